"""What a larger draft is worth: the embedded draft with smaller heads, then drafts of other sizes, right equally often.

The first sweep changes cost and acceptance at once, as a real choice does; the second one holds acceptance at the same
probability, with random weights of several shapes, so that what is left is the draft's cost.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.common import compare, run, write_jobs
from experiments.request import parser_of, request_of

ACCEPT = 0.6
"""About what the embedded draft has on chat prompts."""


def main() -> None:
    """Two sweeps of `amusd compare`; each job of the results says in `sweep` to which it belongs."""
    parser = parser_of("draft_size", __doc__, num_prompts=12, num_tokens=96)
    request = request_of(parser.parse_args())
    # No shape: the layers of the embedded draft, with the head of its 8,192 tokens.
    shapes = "null,smollm2-135m-slice" if request.quick else "null,smollm2-135m-slice,smollm2-135m"
    sizes = "2048,8192" if request.quick else "2048,4096,8192,16384"
    common = [
        "compare.policies=[chain,branching,auto]",
        f"compare.synchronous_lengths={'[2]' if request.quick else '[1,2,3,4]'}",
        *request.workload(),
    ]
    heads = compare([f"drafter.vocab_size={sizes}", *common], request.runs / "heads")
    equal = compare(
        ["drafter=synthetic", f"accept={ACCEPT}", f"drafter.shape={shapes}", "sampling.ignore_eos=true", *common],
        request.runs / "shapes",
    )
    jobs = [job | {"sweep": "vocab_size"} for job in heads] + [job | {"sweep": "shape"} for job in equal]
    write_jobs(request, jobs, accept=ACCEPT)


if __name__ == "__main__":
    run(main)
