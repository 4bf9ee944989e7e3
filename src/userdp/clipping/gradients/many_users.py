"""The sum of the clipped gradients of many users, in one backward pass.

    form every user's gradients (layers) -> norms -> factors -> sum of factor_u g_u

References: Goodfellow 2015 and Li et al. 2022 (norms without gradients), Bu et al. 2023 (one pass
by keeping what the sum needs), Lee & Kifer 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from userdp.clipping.batches.users import Users
from userdp.clipping.execute.execution import Execution
from userdp.clipping.factors import ROUNDING_MARGIN, clip_factors, largest_norm
from userdp.clipping.flat import adding
from userdp.clipping.gradients.forms import EmbeddingRows, Form, Stored
from userdp.clipping.gradients.probes import Probes
from userdp.clipping.gradients.scaled import scaled
from userdp.clipping.gradients.sums import Sums
from userdp.clipping.gradients.survey import Survey
from userdp.clipping.gradients.survey import survey as survey_of
from userdp.clipping.kernels import running
from userdp.clipping.layer_groups import Layers
from userdp.clipping.rules import ClipRule
from userdp.errors import PLAIN, InputError
from userdp.losses import Batch, wide_dtype
from userdp.updates.scaled_gradient import Scales


def look_at(model: nn.Module, batch: Batch, execution: Execution) -> Survey:
    """What `ManyUsers` needs to know of the model: the same for all rows of one shape."""
    # Nothing is compiled for a look.
    eager = replace(execution, skip_mask=False, head_padding=0, chunk_logits=False)
    with eager.attention(model), running.without_plans():
        return survey_of(
            model,
            batch,
            lambda trial: eager.losses(model, trial),
            merge_lora=execution.merge_lora,
        )


class ManyUsers:
    """Clipped sums for batches of one shape; `survey` is what `look_at` gave for such rows.

    `scales` are those that gradients are multiplied by before they are clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        rule: ClipRule,
        example: Users,
        *,
        execution: Execution,
        survey: Survey | None = None,
        scales: Scales | None = None,
    ) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._rule = rule
        self._execution = execution
        self._users = example.count
        self._rows = len(example.weights)
        self._ranges = example.ranges
        found = survey or look_at(model, example.batch, execution)
        numbers = Layers(model, self._parameters).by(rule)
        self._group = {id(p): n for p, n in zip(self._parameters, numbers, strict=True)}
        self._scales = scales
        self._probes = Probes(model, found, example, execution, scales=scales)
        self._sums = Sums(max(numbers) + 1)
        self.margin = ROUNDING_MARGIN * torch.finfo(wide_dtype(self._parameters[0].dtype)).eps

    def __call__(
        self,
        users: Users,
        total: Sequence[Tensor],
        clip_norm: Tensor | float | None = None,
    ) -> Tensor:
        """Add the clipped sum to `total`, one tensor a parameter; return the norms. All secret.

        `clip_norm` as in `clip_factors`.
        """
        forms = self._gradients(users)
        with running.wide_arithmetic(users.weights.device):
            squared = self._squared_norms(forms)
            factors = clip_factors(squared, self._rule, margin=self.margin, clip_norm=clip_norm)
            place = {id(p): tensor for p, tensor in zip(self._parameters, total, strict=True)}
            factors = self._sums.scale(factors, largest_norm(self._rule, clip_norm))
            with adding():
                self._sums.add([place[id(parameter)] for parameter, _ in forms], factors)
        return squared.sum(0).sqrt()

    def norms(self, users: Users) -> Tensor:
        """Every user's norm over all parameters. Secret."""
        forms = self._gradients(users)
        with running.wide_arithmetic(users.weights.device):
            return self._squared_norms(forms).sum(0).sqrt()

    @torch.enable_grad()
    def _gradients(self, users: Users) -> list[tuple[nn.Parameter, Form]]:
        """The users' gradients of every parameter, each in its form."""
        assert (users.count, len(users.weights)) == (self._users, self._rows)
        assert (users.ranges is None) == (self._ranges is None)
        self._ranges = users.ranges
        if users.ranges is not None:
            # A copy: compiled blocks want their inputs aligned.
            self._probes.set_ends(users.ranges.user_starts[1:].clone())
        layers = [(layer.module, layer.rule) for layer in self._probes.layers]
        with self._execution.prepared(self._model, layers, self._probes.tapes):
            losses = self._execution.losses(self._model, users.batch)
            loss = (losses * users.weights.to(losses.dtype)).sum()
            forms = self._forms(self._hand_out(loss))
        if self._scales is not None:
            for place, (parameter, form) in enumerate(forms):
                # One after the other, so that each makes room for the next.
                forms[place] = (parameter, scaled(form, self._scales.of(parameter)))
        return forms

    def _squared_norms(self, forms: list[tuple[nn.Parameter, Form]]) -> Tensor:
        """(layers, users), or (1, users) where all layers are clipped together."""
        grouped = [(self._group[id(parameter)], form) for parameter, form in forms]
        return self._sums.squared_norms(grouped, self._tied_places(forms), self._ranges)

    def _hand_out(self, loss: Tensor) -> dict[nn.Module, dict[str, Tensor]]:
        """What the backward pass returns to the probes, by layer and probe name."""
        tapes = self._probes.tapes
        probes: dict[int, Tensor] = {
            id(probe): probe for tape in tapes.values() for probe in tape.probes.values()
        }
        gradients = torch.autograd.grad(loss, list(probes.values()), allow_unused=True)
        # What compiled blocks return is still attached to their graph.
        detached = [None if g is None else g.detach() for g in gradients]
        by_probe = dict(zip(probes, detached, strict=True))
        return {
            module: {
                name: gradient
                for name, probe in tape.probes.items()
                if (gradient := by_probe[id(probe)]) is not None
            }
            for module, tape in tapes.items()
        }

    def _forms(self, handed: dict[nn.Module, dict[str, Tensor]]) -> list[tuple[nn.Parameter, Form]]:
        found: list[tuple[nn.Parameter, Form]] = []
        seen: set[int] = set()
        for layer in self._probes.layers:
            gradients = handed[layer.module]
            if not gradients:
                continue
            source = self._probes.inputs_from.get(layer.module)
            inputs = handed[source].get("inputs") if source is not None else None
            if source is not None and inputs is None:
                giver = next(other.name for other in self._probes.layers if other.module is source)
                raise InputError(
                    f"{giver!r} has the same input as {layer.name!r}, and the loss does not use "
                    f"its output. Freeze it, or use {PLAIN}."
                )
            for name, form in layer.rule.forms(layer.module, gradients, inputs).items():
                if isinstance(form, Stored) and self._ranges is not None:
                    by_user = self._probes.is_stored_by_user(layer.parameters[name])
                    form = replace(form, by_row=not by_user)
                # A stored gradient that several layers added to is one form.
                key = id(form.gradients_U) if isinstance(form, Stored) else id(form)
                if key not in seen:
                    seen.add(key)
                    found.append((layer.parameters[name], form))
        return found

    def _tied_places(self, forms: list[tuple[nn.Parameter, Form]]) -> list[tuple[int, int]]:
        """Where in `forms` an embedding and the head that shares its weight are."""
        found: list[tuple[int, int]] = []
        for weight in self._probes.tied_weights:
            places = [i for i, (parameter, _) in enumerate(forms) if parameter is weight]
            if len(places) == 2:
                first, second = places
                embedding_first = isinstance(forms[first][1], EmbeddingRows)
                found.append((first, second) if embedding_first else (second, first))
        return found
