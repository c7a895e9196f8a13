"""Bayesian optimisation with PromotingASHA: trials of 2 Horovod ranks pause, and the best continue.

python examples/promoting_asha_digits.py
"""

from digits_mlp import connect_to_ray, train
from ray import tune
from ray.tune.search import ConcurrencyLimiter

from horovod_tune import DistributedTrainableCreator
from horovod_tune.search import BayesOptSearch, PromotingASHA

MAX_EPOCHS = 18
SPACE = {
    "lr": tune.loguniform(1e-4, 1e-0),
    "weight_decay": tune.loguniform(1e-5, 1e-2),
    "batch_size": tune.choice([16, 32, 64, 128]),
    "width": tune.choice([16, 32, 64]),
    "max_epochs": MAX_EPOCHS,
}


def main(num_samples=20, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="promoting_asha_digits",
        config=SPACE,
        metric="accuracy",
        mode="max",
        search_alg=ConcurrencyLimiter(BayesOptSearch(), max_concurrent=4),
        # A trial pauses after 2 and 6 epochs, and continues once it is among the best third of that epoch.
        scheduler=PromotingASHA(time_attr="epoch", max_t=MAX_EPOCHS, grace_period=2, reduction_factor=3),
        num_samples=num_samples,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().best_config)
