"""Faults of the kind that this part can have; each must be seen by a run that looks at every committed state."""

from typing import Any

from thor_spec.kernels.state_commit import reference


def plant(fault: str, runner: Any) -> None:
    """Break the engine of ``runner`` in one way. Raises: KeyError, for an unknown fault."""
    {
        "a boundary inside a step is not saved": lambda: _plan(lambda plan: plan.cut.zero_()),
        "the last accepted token is forgotten": lambda: _plan(lambda plan: plan.accepted.sub_(1).clamp_(min=0)),
        "another block is written": lambda: _plan(lambda plan: plan.slots.add_((plan.slots > 0).int())),
        "vLLM is told how many were accepted": lambda: _told(runner),
    }[fault]()


def _plan(change: Any) -> None:
    stock = getattr(reference.plan_commit, "stock", reference.plan_commit)

    def plan_commit(plan: Any, *args: Any, **kwargs: Any) -> None:
        stock(plan, *args, **kwargs)
        change(plan)

    plan_commit.stock = stock  # type: ignore[attr-defined]
    reference.plan_commit = plan_commit  # type: ignore[assignment]


def _told(runner: Any) -> None:
    state = runner.model_state
    hybrid = type(state).__mro__[1:]

    def postprocess(idx_mapping: Any, num_sampled: Any, computed: Any = None) -> None:
        state.steps.commit(idx_mapping, computed)
        stock = next(base.postprocess_state for base in hybrid if "postprocess_state" in vars(base))
        stock(state, idx_mapping, num_sampled, computed)

    state.postprocess_state = postprocess


def mend() -> None:
    """Take the faults out of this process."""
    reference.plan_commit = getattr(reference.plan_commit, "stock", reference.plan_commit)


FAULTS = (
    "a boundary inside a step is not saved",
    "the last accepted token is forgotten",
    "another block is written",
    "vLLM is told how many were accepted",
)
