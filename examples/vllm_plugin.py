"""vLLM with a draft on a device of its own (docs/vllm.md): `python examples/vllm_plugin.py TARGET DRAFT cuda:1`."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes that import this file
    target, draft, device = sys.argv[1:]
    proposer = "amusd.integrations.vllm.AsyncProposer"
    llm = LLM(
        target,
        speculative_config={"method": "custom_class", "model": proposer, "num_speculative_tokens": 4},
        additional_config={"amusd": {"drafter": {"kind": "hf", "model": draft}, "device": device}},
    )
    answers = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(temperature=0))
    print(answers[0].outputs[0].text)
