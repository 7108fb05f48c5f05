#!/bin/sh
# Make the Redis Cluster of the nodes in $NODES (addresses with ports) where there is none yet, and wait until it is whole.
set -eu
export REDISCLI_AUTH="$HPS_REDIS_PASSWORD"

first=${NODES%% *}
ask() { redis-cli -h "${first%:*}" -p "${first#*:}" cluster "$@"; }

# An existing cluster keeps its nodes and slots; what is left is to wait for it.
if ask info | grep -q 'cluster_known_nodes:1[^0-9]*$'; then
  # shellcheck disable=SC2086 # a list
  timeout 120 redis-cli --cluster create $NODES --cluster-replicas 1 --cluster-yes
fi

tries=0
until ask info | grep -q 'cluster_state:ok' && ! ask nodes | grep -q fail; do
  tries=$((tries + 1))
  if [ "$tries" -ge 60 ]; then
    echo "the cluster is not whole after 60 s:" >&2
    ask nodes >&2
    exit 1
  fi
  sleep 1
done
ask info | grep -E 'cluster_(state|known_nodes|size)'
