#!/bin/sh
# The target on one machine, the draft on another. Run the same line on both; the first becomes the target:
#
#   TARGET_HOST=10.0.0.1 NODE_RANK=0 launch/two_nodes.sh prompt="Why is the sky blue?"     # on 10.0.0.1
#   TARGET_HOST=10.0.0.1 NODE_RANK=1 launch/two_nodes.sh                                   # on the other
#
# Two ports of TARGET_HOST must be reachable: STORE_PORT (torchrun) and LINK_PORT (candidates and verdicts). Neither is
# encrypted or authenticated: use it inside a network you trust, which is what transport.insecure=true says.
set -eu
: "${TARGET_HOST:?the address of the target machine}" "${NODE_RANK:?0 for the target, 1 for the draft}"
exec torchrun --nnodes=2 --nproc-per-node=1 --node-rank="$NODE_RANK" \
    --master-addr="$TARGET_HOST" --master-port="${STORE_PORT:-29500}" \
    "$(dirname "$0")/run.py" transport=zeromq \
    transport.address="tcp://$TARGET_HOST:${LINK_PORT:-29501}" transport.insecure=true "$@"
