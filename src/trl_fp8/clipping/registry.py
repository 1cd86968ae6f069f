"""Clip policies by name: every class of this folder with a `name`, or a dotted path to a class of the user."""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .policy import ClippingPolicy


def policies() -> dict[str, type[ClippingPolicy]]:
    """The policies of this package by name. A new one is a module in this folder, and nothing else."""
    names = [info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])]
    found: dict[str, type[ClippingPolicy]] = {}
    for module in [importlib.import_module(f".{name}", __package__) for name in names]:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, ClippingPolicy) and value.__module__ == module.__name__:
                name = vars(value).get("name")  # its own: a subclass inherits its parent's
                if name is not None:
                    found[name] = value
    return found


def policy_class(clip_policy: str) -> type[ClippingPolicy]:
    """The class that `clip_policy` names.

    Raises:
        ValueError: there is no such name, or the dotted path leads to something else.
    """
    known = policies()
    if clip_policy in known:
        return known[clip_policy]
    module, _, name = clip_policy.rpartition(".")
    if not module:
        names = ["auto", "fixed", *sorted(known)]
        close = difflib.get_close_matches(clip_policy, names, 1)
        raise ValueError(
            f"clip_policy={clip_policy!r} is not a policy of this package. "
            f"{f'Did you mean {close[0]!r}? ' if close else ''}Use one of {', '.join(names)}, or the dotted path of a "
            "ClippingPolicy, such as 'my_module.MyPolicy'."
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(
            f"clip_policy={clip_policy!r} cannot be imported ({error}). Start where Python finds the module "
            f"{module!r}, or add its folder to PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"clip_policy={clip_policy!r}: the module {module!r} has no {name!r} ({error}). Name one of its classes."
        ) from error
    if not (isinstance(found, type) and issubclass(found, ClippingPolicy)):
        raise ValueError(
            f"clip_policy={clip_policy!r} is a {type(found).__name__}, not a subclass of trl_fp8.ClippingPolicy. Name "
            "a class that inherits from it."
        )
    return found


def build_policy(
    clip_policy: str, kwargs: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> ClippingPolicy:
    """The policy that `clip_policy` names, built with `kwargs`, which win over `settings` of the run.

    Raises:
        ValueError: as [`policy_class`], or the policy does not take these arguments.
    """
    cls = policy_class(clip_policy)
    try:
        return cls(**{**(settings or {}), **kwargs})
    except TypeError as error:
        raise ValueError(
            f"clip_policy_kwargs={dict(kwargs)!r} with clip_policy={clip_policy!r}: {error}. Pass the arguments of "
            f"{cls.__name__}."
        ) from error
