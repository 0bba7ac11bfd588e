#!/bin/sh
# The target on one machine, the draft on another. Make keys once (`amusd keys keys`) and give each machine its own role's
# .key_secret, the other role's .key, and store.key_secret. Then the same line on both; the first becomes the target:
#
#   TARGET_HOST=10.0.0.1 NODE_RANK=0 launch/two_nodes.sh transport.keys=keys prompt="Why is the sky blue?"   # on 10.0.0.1
#   TARGET_HOST=10.0.0.1 NODE_RANK=1 launch/two_nodes.sh transport.keys=keys                                 # on the other
#
# Two ports of TARGET_HOST must be reachable: STORE_PORT (how to start; sealed with the keys, not encrypted, and without
# the prompt) and LINK_PORT (candidates and verdicts, encrypted). On a network you trust, transport.insecure=true does
# without keys. PYTHON names the interpreter. SECURITY.md says what is protected and what is not. Either machine may be
# first: each says what it waits for, how much longer, and what came of it (60 s for the other machine, then
# startup_timeout_seconds for its models).
set -eu
: "${TARGET_HOST:?the address of the target machine}" "${NODE_RANK:?0 for the target, 1 for the draft}"
case "$NODE_RANK" in
0 | 1) ;;
*)
    echo "amusd: NODE_RANK=$NODE_RANK: allowed: 0 for the target, 1 for the draft" >&2
    exit 2
    ;;
esac
folder="$(dirname "$0")"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-FATAL}" # torch's sockets tell every attempt, with a stack trace
unset TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE # of an outer torchrun
export RANK="$NODE_RANK" LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1
export MASTER_ADDR="$TARGET_HOST" MASTER_PORT="${STORE_PORT:-29500}"
exec "${PYTHON:-python3}" "$folder/run.py" \
    transport=zeromq transport.address="tcp://$TARGET_HOST:${LINK_PORT:-29501}" "$@"
