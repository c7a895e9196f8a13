import ray

ray.WorkerID.from_random()
