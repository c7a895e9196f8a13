"""Plots of an experiment: each function takes the analysis and returns a `plotly.graph_objects.Figure`.

```python
from horovod_tune import analyze
from horovod_tune.analysis import plots

figure = plots.learning_curves(analyze("~/ray_results/digits"))  # a notebook shows it
figure.write_html("curves.html")
figure.write_image("curves.png")  # needs `pip install kaleido`
```

Colours are Okabe and Ito's for a few things and cividis for many; both suit readers with colour blindness.
Each function that needs the metric raises `MetricUnknown` if it is not known.
"""

from horovod_tune.analysis.plots.hyperparameters import (
    importance,
    parallel_coordinates,
    parameter,
    parameters,
)
from horovod_tune.analysis.plots.learning_curves import best_so_far, learning_curves
from horovod_tune.analysis.plots.scheduling import pareto_front, timeline

__all__ = [
    "best_so_far",
    "importance",
    "learning_curves",
    "parallel_coordinates",
    "parameter",
    "parameters",
    "pareto_front",
    "timeline",
]
