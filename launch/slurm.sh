#!/bin/sh
# An engine over the nodes of a Slurm job, one torchrun on each (docs/several_machines.md):
#
#   PROCESSES="8 1" sbatch --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 launch/slurm.sh serve transport.keys=keys ...
#
# PROCESSES: number of processes on each node; in all one for each rank of the target and, last, one for the draft.
# PORT: torchrun's port; the links use PORT + 1 and the next ports. PYTHON: the interpreter.
set -eu
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
address="$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname -I | cut -d " " -f 1)"
export ADDRESS="$address" PORT="${PORT:-29500}" PYTHON="${PYTHON:-python3}" PROCESSES="${PROCESSES:-1 1}"
# shellcheck disable=SC2016  # each node fills in its own
exec srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} sh -c '
    exec "$PYTHON" -m torch.distributed.run --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \
        --nproc-per-node="$(echo "$PROCESSES" | cut -d " " -f "$((SLURM_NODEID + 1))")" \
        --master-addr="$ADDRESS" --master-port="$PORT" -m amusd_launch.run \
        "$@" transport.address="tcp://$ADDRESS:$((PORT + 1))"' sh "$@"
