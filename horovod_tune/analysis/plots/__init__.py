"""Pictures of an experiment (matplotlib): each function takes the analysis and returns the Axes.

```python
from horovod_tune import analyze
from horovod_tune.analysis import plots

plots.learning_curves(analyze("~/ray_results/digits"))
```

Colours are Okabe and Ito's for a few things and cividis for many: both can be told apart by people with any
kind of colour blindness.
"""

from horovod_tune.analysis.plots.hyperparameters import importance, interaction, parameter, parameters
from horovod_tune.analysis.plots.learning_curves import best_so_far, learning_curves
from horovod_tune.analysis.plots.parallel import parallel_coordinates
from horovod_tune.analysis.plots.pareto_plot import pareto_front
from horovod_tune.analysis.plots.scheduling import rungs, timeline

__all__ = [
    "best_so_far",
    "importance",
    "interaction",
    "learning_curves",
    "parallel_coordinates",
    "parameter",
    "parameters",
    "pareto_front",
    "rungs",
    "timeline",
]
