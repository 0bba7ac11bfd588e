#!/bin/bash
# One engine over the nodes of a Slurm job, one task a node: the last node has the draft, those before it share the ranks
# of the target. amusd is installed on every node (PYTHON names the interpreter), and models and keys lie in folders that
# all of them see.
#
#   amusd keys "$HOME/keys"                            # once: a link between machines is encrypted
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh generate transport.keys="$HOME/keys" hardware=two_nodes \
#       target=/models/70B drafter=/models/8B workload.path=prompts.jsonl out=answers.jsonl
#
# Many engines share a file of prompts as an array; each task adds its shard, and the same line goes on with what is left
# (SHARDS=8 sbatch --array=3 ... for one of them):
#
#   sbatch --nodes=1 --gpus-per-node=2 --array=1-8 launch/slurm.sh generate workload.path=prompts.jsonl out=answers.jsonl ...
#
# TARGET_HOST: the first node's address on the network to use; its name if that is not set. STORE_PORT and LINK_PORT are
# reached there (`launch/two_nodes.sh` says what for); the job's number picks them, so that jobs can share a node. srun
# ends nothing by itself: without its draft the target goes on, and without the target the draft ends.
#SBATCH --job-name=amusd
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=amusd-%j.out
set -euo pipefail

refuse() {
    echo "amusd: $1" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || refuse "launch/slurm.sh: start it with sbatch; on one machine, use the amusd command"
case "${1:-}" in
generate | serve | compare) ;;
*) refuse "launch/slurm.sh: name a command first: generate, serve or compare" ;;
esac
num_nodes="${SLURM_JOB_NUM_NODES:?}"
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    num_shards="${SHARDS:-${SLURM_ARRAY_TASK_COUNT:?}}"
    if [ "$SLURM_ARRAY_TASK_ID" -lt 1 ] || [ "$SLURM_ARRAY_TASK_ID" -gt "$num_shards" ]; then
        refuse "--array: task $SLURM_ARRAY_TASK_ID of $num_shards; expected --array=1-$num_shards, or SHARDS=N for some of N"
    fi
    set -- "$@" "shard=$SLURM_ARRAY_TASK_ID/$num_shards"
fi
python="${PYTHON:-python3}"
options=(--nodes="$num_nodes" --ntasks="$num_nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0)
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK") # srun does not take it over from sbatch
fi
if [ "$num_nodes" -eq 1 ]; then
    exec srun "${options[@]}" "$python" -m amusd_launch.main "$@"
fi

first="${TARGET_HOST:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}" | sed -n 1p)}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-FATAL}" # torch's sockets tell every attempt, with a stack trace
export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 WORLD_SIZE="$num_nodes"
export MASTER_ADDR="$first" MASTER_PORT="${STORE_PORT:-$((20000 + SLURM_JOB_ID % 5000 * 2))}"
unset TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE # of an outer torchrun
# shellcheck disable=SC2016  # each task's own shell expands it
exec srun "${options[@]}" sh -c 'export RANK="$SLURM_PROCID"; exec "$@"' amusd "$python" -m amusd_launch.run "$1" \
    transport=zeromq transport.address="tcp://$first:${LINK_PORT:-$((20001 + SLURM_JOB_ID % 5000 * 2))}" "${@:2}"
