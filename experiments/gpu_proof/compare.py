"""Plain, synchronous and asynchronous decoding of a pair with random weights, as `amusd compare` does it."""

from __future__ import annotations

from amusd.commands.compare import Comparison
from amusd.commands.contestants import contestants_of
from amusd.config import CompareConfig, DrafterConfig, HardwareConfig, RunConfig, SamplingParams, WorkloadConfig
from amusd.engine import Engine
from amusd.runtime.draft_process import DraftSource
from amusd.tracing.recorder import Recorder, as_format
from amusd.workload import load_prompts
from experiments.gpu_proof.plan import Scale
from experiments.gpu_proof.records import Job

SAMPLINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.95},
}
KEPT = (
    "tokens_per_second",
    "speedup_vs_autoregressive",
    "speedup_vs_best_synchronous",
    "acceptance_rate",
    "tokens_per_verification",
    "target_idle_fraction",
    "draft_idle_fraction",
    "identical_to_autoregressive",
    "time_to_first_token_ms",
    "sequence_ids",
)


def high(job: Job) -> None:
    """Compare at the higher acceptance."""
    compare(job, job.scale.accepts[0], "compare_high")


def low(job: Job) -> None:
    """Compare at the lower acceptance."""
    compare(job, job.scale.accepts[-1], "compare_low")


def compare(job: Job, accept: float, part: str) -> None:
    """Compare under all samplings with one pair."""
    first = run_config(job.scale, accept, "greedy")
    folder = job.results / part
    folder.mkdir(parents=True)
    config = first.engine_for("compare")
    events = f"{as_format(folder)}/events"
    with Engine.connect(config, DraftSource(config), Recorder("target", events)) as engine:
        for sampling in SAMPLINGS:
            _one_sampling(job, engine, run_config(job.scale, accept, sampling), accept, sampling)


def _one_sampling(job: Job, engine: Engine, config: RunConfig, accept: float, sampling: str) -> None:
    comparison = Comparison(engine, config, contestants_of(config))
    for _ in comparison.turns(load_prompts(config.workload)):
        pass
    for row in comparison.rows():
        job.write(
            "compare",
            accept=accept,
            sampling=sampling,
            mode=row["mode"],
            policy=row["policy"],
            num_speculative_tokens=row["num_speculative_tokens"],
            **{name: row[name] for name in KEPT},
        )


def run_config(scale: Scale, accept: float, sampling: str) -> RunConfig:
    """The settings of `amusd compare`, and of the simulation of both devices."""
    return RunConfig(
        accept=accept,
        drafter=DrafterConfig(kind="synthetic", shape=scale.draft),
        hardware=HardwareConfig(synthetic=scale.target, devices=(scale.device, scale.device)),
        sampling=SamplingParams(max_new_tokens=scale.num_tokens, ignore_eos=True, **SAMPLINGS[sampling]),
        workload=WorkloadConfig(num_prompts=scale.num_prompts),
        compare=CompareConfig(synchronous_lengths=scale.synchronous_lengths),
    )
