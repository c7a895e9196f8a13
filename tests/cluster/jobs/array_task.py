"""One task of a Slurm job array: the first ends by itself, the second waits. It cannot resume."""

import os
import time

import ray

task = int(os.environ["SLURM_ARRAY_TASK_ID"])
count = int(os.environ["SLURM_ARRAY_TASK_COUNT"])
ray.init(address="auto", log_to_driver=False)
if task == 0:
    print(f"task 0 of {count} ends", flush=True)
else:
    print(f"task {task} of {count} waits", flush=True)
    time.sleep(600)
