#!/usr/bin/env bash
# BERT-base on one machine, with all its GPUs: bash examples/node.sh
# Again after it stopped, it goes on. Change: the text, the store's and the run's folders, the recipe.
set -euo pipefail
cd "$(dirname "$0")/.."

pip install -e '.[cuda]'
bert-jax prepare 'text/*.txt' stores/mine --tokenizer=wordpiece --vocab-size=30522
python train.py --config=configs/base.py --workdir=runs/base --config.data.source=stores/mine
