#!/bin/sh
# How far ahead should the draft be, and how long should the target wait for it? One sweep, whose results are in
# sweep/sweep.json. The same command continues an interrupted sweep. Keys that are given win over those below:
#
#   examples/sweep.sh                                        # the embedded pair
#   examples/sweep.sh target=hf target.model=/models/big drafter=hf drafter.model=/models/small hardware=two_gpus
#
# AMUSD names the command (default: amusd).
set -eu
folder="$(dirname "$0")"
# AMUSD may be several words.
# shellcheck disable=SC2086
exec ${AMUSD:-amusd} compare -m policy=chain max_lookahead=4,16 min_candidates=0,2 compare.synchronous_lengths=[2] \
    workload.path="$folder/prompts.jsonl" workload.num_prompts=2 sampling.max_new_tokens=32 run_dir=sweep "$@"
