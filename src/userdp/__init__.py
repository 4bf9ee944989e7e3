"""User-level differential privacy for language models: the library on one screen.

    store     = UserStore.open(...)          records with their owners
    bound(...).selection                     at most k records of each user, if one has several
    plan      = Plan.sample_users(...)       sampler + clip + noise + steps, and what they cost
    model, tokenizer = load_model(...)       a Hugging Face model as it is, with LoRA if asked
    run       = train(...)                   the private loop
    run.statement                            what may be said about the model

    UserDPTrainer(model, args, ...)          the same for scripts that use a Trainer of transformers

    PrivateStep                              the step alone, for a loop of your own
    Validation, evaluate_store               loss on other people, during a run or after it
    personalize                              what each of them gains by a model of their own
    UserIndex                                whose rows are whose, for data of your own
    Population.of(store)                     what all runs and looks on these people cost together
    verify                                   does one user move your model's sum by at most C?

Names load on first use, so that accounting starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from userdp.bounding.bound import Bounded as Bounded
    from userdp.bounding.bound import bound as bound
    from userdp.budget.population import Population as Population
    from userdp.clipping.rules import AdaptiveClip as AdaptiveClip
    from userdp.clipping.rules import AutomaticClip as AutomaticClip
    from userdp.clipping.rules import FlatClip as FlatClip
    from userdp.clipping.rules import NormalisedClip as NormalisedClip
    from userdp.clipping.rules import PerLayerClip as PerLayerClip
    from userdp.clipping.rules import PerVectorClip as PerVectorClip
    from userdp.clipping.settings import StepSettings as StepSettings
    from userdp.data.store import UserStore as UserStore
    from userdp.errors import BudgetExhaustedError as BudgetExhaustedError
    from userdp.errors import InputError as InputError
    from userdp.errors import MixedExamplesError as MixedExamplesError
    from userdp.errors import UnaccountedPlanError as UnaccountedPlanError
    from userdp.evaluation import evaluate as evaluate
    from userdp.evaluation import evaluate_store as evaluate_store
    from userdp.index import UserIndex as UserIndex
    from userdp.ledger.book import Ledger as Ledger
    from userdp.models.adapters import Lora as Lora
    from userdp.models.load import load_model as load_model
    from userdp.optimizers.averaging import WeightAverage as WeightAverage
    from userdp.optimizers.public_gradient import PublicData as PublicData
    from userdp.optimizers.scaled_momentum import ScaledMomentum as ScaledMomentum
    from userdp.personalization import personalize as personalize
    from userdp.plan import Plan as Plan
    from userdp.prices.marks import Hypothetical as Hypothetical
    from userdp.prices.marks import RecordLevel as RecordLevel
    from userdp.probe.verify import Verified as Verified
    from userdp.probe.verify import verify as verify
    from userdp.runs.checkpoints import Saving as Saving
    from userdp.runs.record import RunRecord as RunRecord
    from userdp.statement import Statement as Statement
    from userdp.step import PrivateStep as PrivateStep
    from userdp.trainer import UserDPTrainer as UserDPTrainer
    from userdp.training.loop import train as train
    from userdp.training.validation import Validation as Validation
    from userdp.units import Adjacency as Adjacency

__version__ = "0.1.0"

_HOME = {
    "AdaptiveClip": "userdp.clipping.rules",
    "Adjacency": "userdp.units",
    "AutomaticClip": "userdp.clipping.rules",
    "Bounded": "userdp.bounding.bound",
    "BudgetExhaustedError": "userdp.errors",
    "FlatClip": "userdp.clipping.rules",
    "Hypothetical": "userdp.prices.marks",
    "InputError": "userdp.errors",
    "Ledger": "userdp.ledger.book",
    "Lora": "userdp.models.adapters",
    "MixedExamplesError": "userdp.errors",
    "NormalisedClip": "userdp.clipping.rules",
    "PerLayerClip": "userdp.clipping.rules",
    "PerVectorClip": "userdp.clipping.rules",
    "Plan": "userdp.plan",
    "Population": "userdp.budget.population",
    "PrivateStep": "userdp.step",
    "PublicData": "userdp.optimizers.public_gradient",
    "RecordLevel": "userdp.prices.marks",
    "RunRecord": "userdp.runs.record",
    "Saving": "userdp.runs.checkpoints",
    "ScaledMomentum": "userdp.optimizers.scaled_momentum",
    "Statement": "userdp.statement",
    "StepSettings": "userdp.clipping.settings",
    "UnaccountedPlanError": "userdp.errors",
    "UserDPTrainer": "userdp.trainer",
    "UserIndex": "userdp.index",
    "UserStore": "userdp.data.store",
    "Validation": "userdp.training.validation",
    "Verified": "userdp.probe.verify",
    "WeightAverage": "userdp.optimizers.averaging",
    "bound": "userdp.bounding.bound",
    "evaluate": "userdp.evaluation",
    "evaluate_store": "userdp.evaluation",
    "load_model": "userdp.models.load",
    "personalize": "userdp.personalization",
    "train": "userdp.training.loop",
    "verify": "userdp.probe.verify",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'userdp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
