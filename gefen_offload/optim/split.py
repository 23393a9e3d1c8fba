"""Which parameters of a model are hidden matrices, for Muon, and which belong to a backup optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

BACKUP_SUBSTRINGS = ("embed", "wte", "wpe", "lm_head", "classifier", "score")

Named = list[tuple[str, Tensor]]


def split_params_for_muon(
    model: nn.Module, backup_substrings: Iterable[str] = BACKUP_SUBSTRINGS
) -> tuple[Named, Named]:
    """The trainable parameters of `model` as two lists of (name, parameter): for Muon, and for the backup.

    Muon's are 2-D, are not the weight of an embedding, by the module's type and the tensor's identity, so that a tied
    head follows its embedding, and have none of `backup_substrings`, in any case, in any of their names.
    """
    fragments = [fragment.lower() for fragment in backup_substrings]
    names = _names(model)
    kept_back = _embedding_weights(model)
    muon: Named = []
    backup: Named = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        named_back = any(fragment in alias.lower() for alias in names[id(parameter)] for fragment in fragments)
        hidden = parameter.dim() == 2 and id(parameter) not in kept_back and not named_back
        (muon if hidden else backup).append((name, parameter))
    return muon, backup


def check_split(model: nn.Module, muon: Named, backup: Named) -> None:
    """Raise unless the two lists hold each trainable parameter of `model` once, under names that differ."""
    for side, named in (("Muon", muon), ("backup", backup)):
        for item in named:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
                raise TypeError(f"the {side} list must hold (name, parameter) pairs, not a {type(item).__name__}")
        _check_once(named, side)
    owners = {id(parameter): name for name, parameter in muon}
    both = [name for name, parameter in backup if id(parameter) in owners]
    if both:
        raise ValueError(f"{both[0]} is in the Muon list and in the backup list: it would step twice")
    repeated = [name for name, count in Counter(name for name, _ in (*muon, *backup)).items() if count > 1]
    if repeated:
        raise ValueError(f"the name {repeated[0]!r} stands for more than one parameter; give each its own")
    owners.update({id(parameter): name for name, parameter in backup})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in owners:
            raise ValueError(f"{name} is trainable and in neither list: it would never be updated")


def _check_once(named: Named, side: str) -> None:
    seen: dict[int, str] = {}
    for name, parameter in named:
        if id(parameter) in seen:
            raise ValueError(f"the {side} list holds one parameter twice, as {seen[id(parameter)]!r} and {name!r}")
        seen[id(parameter)] = name


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Every name of every parameter: a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _embedding_weights(model: nn.Module) -> set[int]:
    tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return {id(table.weight) for table in tables}
