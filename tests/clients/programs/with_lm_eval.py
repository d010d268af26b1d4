"""lm-eval's local-completions on a task of its own making; prints the scores and the samples."""

import json
import os
import tempfile
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

CHOICE = """
task: graft_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WRITE = """
task: graft_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["q"], max_gen_toks: 24, temperature: 0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    os.environ["HF_DATASETS_CACHE"] = name
    rows = [
        {"question": f"Count {i} {i + 1} {i + 2}", "choices": [f" {i + 3}", " x", " tree"]}
        for i in range(12)
    ]
    data = folder / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    for task in (CHOICE, WRITE):
        text = task.format(data=data)
        (folder / f"{text.split()[1]}.yaml").write_text(text)
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": os.environ["GRAFT_URL"] + "/v1/completions",
            "tokenizer": os.environ["GRAFT_MODEL"],
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_retries": 1,
            "max_length": 500,
        },
        tasks=["graft_choice", "graft_write"],
        task_manager=TaskManager(include_path=name, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
samples = {
    task: [sample["filtered_resps"] for sample in several]
    for task, several in found["samples"].items()
}
print("SCORES " + json.dumps([found["results"], samples], default=str, sort_keys=True))
