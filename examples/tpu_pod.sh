#!/usr/bin/env bash
# BERT-large on a slice of a TPU pod, started again after every preemption: bash examples/tpu_pod.sh
# Run it in the repository's folder, in tmux, where gcloud is logged in. It ends when training
# ends, or after 20 attempts that fail at once.
# With an ssh-agent, first: ssh-add ~/.ssh/google_compute_engine (gcloud needs it for several hosts).
# Give other values as variables: TYPE=v4-32 RUNTIME=tpu-ubuntu2204-base bash examples/tpu_pod.sh
# Change: in examples/tpu_host.sh the recipe and the folders.
set -euo pipefail
name=${NAME:-bert-large} zone=${ZONE:-us-west4-a}
type=${TYPE:-v5litepod-16}  # 4x4 chips on four hosts; v5litepod-256 for 16x16 on 64
# v5p: v2-alpha-tpuv5; v6e: v2-alpha-tpuv6e; v4: tpu-ubuntu2204-base
runtime=${RUNTIME:-v2-alpha-tpuv5-lite}
bucket=${BUCKET:-gs://my-bucket/bert}  # in the region of the slice; the text is in its stores/mine

state() {
  if gcloud compute tpus queued-resources describe "$name" --zone="$zone" \
    --format='value(state.state)' 2>"$errors"; then
    return
  elif grep -q NOT_FOUND "$errors"; then
    echo none
  else
    cat "$errors" >&2  # and look again
  fi
}

on_every_host() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

train() {
  git archive --format=tar.gz --output="$archive" HEAD &&  # what is committed
  gcloud compute tpus tpu-vm scp "$archive" "$name:bert-jax.tar.gz" --zone="$zone" --worker=all &&
    on_every_host "mkdir -p bert-jax && tar -xzf bert-jax.tar.gz -C bert-jax" &&
    on_every_host "bash bert-jax/examples/tpu_host.sh $bucket"
}

archive=$(mktemp) errors=$(mktemp)
trap 'rm -f "$archive" "$errors"' EXIT
failures=0  # one after the other, within ten minutes each
while true; do
  case $(state) in
    none)
      gcloud compute tpus queued-resources create "$name" --node-id="$name" --zone="$zone" \
        --accelerator-type="$type" --runtime-version="$runtime" --spot || true
      ;;
    ACTIVE)
      code=0 began=$SECONDS
      train || code=$?
      case $code in
        0 | 101 | 102) break ;;  # finished, or the last lines say what is wrong
      esac
      if ((SECONDS - began < 600)); then failures=$((failures + 1)); else failures=0; fi
      if ((failures == 20)); then
        echo "20 attempts failed within ten minutes each; the lines above say how" >&2
        break
      fi
      ;;
    SUSPENDED | FAILED)  # preempted: it stays so
      failures=0
      gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force --quiet || true
      ;;
  esac
  sleep 60
done
if ((code == 0)); then
  gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force --quiet
else
  echo "the slice stays, and costs; delete it with" >&2
  echo "gcloud compute tpus queued-resources delete $name --zone=$zone --force" >&2
fi
exit "$code"
