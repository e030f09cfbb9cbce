"""The planned architectures of this process: registered in vLLM, and proven by the class that a worker built."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from vllm_graft.bindings.instantiate import failure_reason, instantiate
from vllm_graft.bindings.models.interface import find_model_mistake
from vllm_graft.bindings.models.weights import WeightReader, reading
from vllm_graft.contracts import ModelPlugin, ModelView
from vllm_graft.errors import GraftError, StartError
from vllm_graft.ledger import current
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.ledger.record import ItemStateName
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load
from vllm_graft.points import Role

_WAITS: Final = "registered; no worker has built a model yet"
_ABSENT: Final = object()


@dataclass(slots=True)
class RegisteredModel:
    """A plugin whose architectures are registered in this process."""

    item: PlanItem
    plugin: ModelPlugin


class PlannedModels:
    """The plugins of this process by architecture, and what was in vLLM's tables before them."""

    def __init__(self) -> None:
        self._by_architecture: dict[str, RegisteredModel] = {}
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._failures: dict[str, str] = {}

    def register(self, plan: Plan, roles: set[Role]) -> list[tuple[PlanItem, GraftError]]:
        """Register the architectures of all planned models; return the items that were refused."""
        refused: list[tuple[PlanItem, GraftError]] = []
        self.forget()
        for item in plan.of("model"):
            try:
                plugin = instantiate(item, ModelPlugin, plan, current())
                if plugin is None:
                    continue
                self._register(item, plugin)
            except GraftError as error:
                current().set_item(item.point, item.name, "refused", str(error))
                refused.append((item, error))
                continue
            # A worker shows more, unless it is one that builds no model.
            state: ItemStateName = "armed" if "worker" in roles and _builds_models() else "applied"
            current().set_item(item.point, item.name, state, _WAITS if state == "armed" else "registered")
        return refused

    def forget(self) -> None:
        """Put vLLM's tables back, for another plan."""
        for table, name, value in reversed(self._before):
            if value is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = value
        self._before.clear()
        self._by_architecture.clear()
        self._failures.clear()

    def _register(self, item: PlanItem, plugin: ModelPlugin) -> None:
        from vllm.model_executor.models.registry import ModelRegistry

        replaces = bool(item.options["replace"])
        for architecture in plugin.architectures:
            if (rival := self._by_architecture.get(architecture)) is not None:
                raise StartError(
                    f"the models {rival.item.name!r} and {item.name!r} both register {architecture}",
                    where=item.origin,
                    fix="remove one of the two from the plan for this model",
                )
            known = ModelRegistry.models.get(architecture)
            if known is not None and _target_of(known) != plugin.model and not replaces:
                raise StartError(
                    f"the model {item.name!r} registers {architecture}, which is already there as {_target_of(known)}",
                    where=item.origin,
                    fix=f"rename the architecture in the model's config.json and in {item.target}, or set `replace = "
                    f"true` under [options.{item.name}] to have {plugin.model}",
                )
        if plugin.config:
            self._register_config(item, plugin, replaces=replaces)
        for architecture in plugin.architectures:
            self._before.append((ModelRegistry.models, architecture, ModelRegistry.models.get(architecture, _ABSENT)))
            ModelRegistry.register_model(architecture, plugin.model)
            self._by_architecture[architecture] = RegisteredModel(item, plugin)

    def _register_config(self, item: PlanItem, plugin: ModelPlugin, *, replaces: bool) -> None:
        """Add the configuration's class to vLLM's own table, which goes before that of transformers."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from vllm.transformers_utils import config as vllm_configs

        kind = load(plugin.config, item.name, item.package)
        name: object = getattr(kind, "model_type", None)
        if not isinstance(name, str) or not name:
            raise StartError(
                f"the configuration of the model {item.name!r} has no model_type",
                where=plugin.config,
                fix="set it to the `model_type` of the model's config.json",
            )
        table: dict[str, Any] = vllm_configs._CONFIG_REGISTRY
        taken = name in table or name in CONFIG_MAPPING
        if taken and not replaces and (table.get(name) if name in table else CONFIG_MAPPING[name]) is not kind:
            raise StartError(
                f"the model {item.name!r} registers the model_type {name!r}, which is already there",
                where=plugin.config,
                fix=f"use another `model_type`, or set `replace = true` under [options.{item.name}]",
            )
        self._before.append((table, name, dict.get(table, name, _ABSENT)))
        table[name] = kind

    def inspect(self, registered: Any, call: Callable[[], Any]) -> Any:
        """Have vLLM inspect a registered class, and remember why it could not: vLLM only logs that."""
        try:
            return call()
        except Exception as error:
            self._failures[_target_of(registered)] = _last_line(str(error))
            raise

    def check_inspected(self, kind: Any) -> None:
        """Refuse a planned class that this vLLM cannot use, where vLLM inspects it."""
        target = f"{kind.__module__}:{kind.__qualname__}"
        found = next((each for each in self._by_architecture.values() if each.plugin.model == target), None)
        if found is not None:
            _check_class(found, kind)

    def explanation(self, error: BaseException) -> StartError | None:
        """Return a better error than vLLM's own if it could not inspect a planned class."""
        for found in self._by_architecture.values():
            if (reason := self._failures.get(found.plugin.model)) and not raised_by_signal(error):
                # What our own check raised there names the place and the next step itself.
                reason = reason.removeprefix("vllm_graft.errors.StartError: ")
                own = "Next: " in reason
                return StartError(
                    f"the model {found.item.name!r} (from {found.item.origin}) cannot be used: {reason}",
                    where="" if own else found.plugin.model,
                    fix="" if own else f"see that it can be imported, or remove {found.item.name!r} from the plan",
                )
        return None

    def check_model(self, config: Any) -> None:
        """Let the plugin of the model that is about to be served refuse it; called in the front end."""
        found, architecture = self._of_config(config.model_config)
        if found is None:
            return
        model, parallel = config.model_config, config.parallel_config
        view = ModelView(
            name=model.model,
            architecture=architecture,
            config=model.hf_config.to_dict(),
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=model.quantization,
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
        )
        try:
            found.plugin.check(view)
        except BaseException as error:
            reason = str(error) if isinstance(error, ValueError) else failure_reason(error)
            self._refuse(found, f"it refuses this model: {reason}", model.model, "serve another, or correct the model")

    def load_model(self, worker: Any, call: Callable[[], Any]) -> Any:
        """Have a worker load its model, and record the class that it built."""
        config = worker.vllm_config.model_config
        found, architecture = self._of_config(config)
        if found is None:
            result = call()
            for each in self._by_architecture.values():
                others = f"registered; this model is a {architecture}"
                current().set_item(each.item.point, each.item.name, "applied", others)
            current().save()
            return result
        kind = self._import(found)
        reader = WeightReader({})
        try:
            with reading(kind, found.plugin.weights) as reader:
                result = call()
        except BaseException as error:
            if raised_by_signal(error) or isinstance(error, GraftError):
                raise
            read = f" at the weight {reader.current}" if reader.current else ""
            parallel = worker.vllm_config.parallel_config.tensor_parallel_size
            spread = f", with {parallel} workers for each layer" if parallel > 1 else ""
            fix = "correct the class, its `weights` or the checkpoint"
            if spread:
                fix += ", or choose a --tensor-parallel-size that divides its layers"
            self._refuse(found, f"it cannot be loaded{read}{spread}: {reason_of(error)}", config.model, fix, error)
        # vLLM lets most layers stay as they were allocated. Those of a quantized model have parameters of their own.
        if reader.missing and config.quantization is None:
            names = sorted(reader.missing)
            more = f" and {len(names) - 5} others" if len(names) > 5 else ""
            what = f"the checkpoint has nothing for {', '.join(names[:5])}{more}"
            self._refuse(found, what, config.model, "correct the class, its `weights` or the checkpoint")
        built = type(worker.model_runner.get_model())
        # A subclass of it where vLLM makes an embedding model or a classifier of a decoder.
        if not issubclass(built, kind):
            what = f"the worker built {built.__module__}:{built.__qualname__} for {architecture}"
            self._refuse(found, what, found.plugin.model, "remove the other package that registers it")
        item = found.item
        current().set_item(item.point, item.name, "applied", f"built {found.plugin.model} for {architecture}")
        current().save()
        return result

    def _of_config(self, config: Any) -> tuple[RegisteredModel | None, str]:
        """Return the plugin of a model's architecture, and that architecture's name."""
        names = list(getattr(config, "architectures", None) or ())
        # The one that vLLM chose from them, where it says so.
        chosen = getattr(config, "architecture", None) or next(iter(names), "")
        return next(
            ((self._by_architecture[name], name) for name in (chosen, *names) if name in self._by_architecture),
            (None, str(chosen)),
        )

    def _import(self, found: RegisteredModel) -> type:
        module, _, name = found.plugin.model.partition(":")
        try:
            kind: Any = getattr(importlib.import_module(module), name)
        except BaseException as error:
            reason = failure_reason(error)
            self._refuse(found, f"its class cannot be imported: {reason}", found.plugin.model, "repair it", error)
        _check_class(found, kind)
        made: type = kind
        return made

    def _refuse(
        self, found: RegisteredModel, reason: str, where: str, fix: str, cause: BaseException | None = None
    ) -> NoReturn:
        """Record and raise that a model cannot be served: there is none to go on with, however lenient the plan."""
        item = found.item
        error = StartError(
            f"the model {item.name!r} (from {item.origin}) cannot be used: {reason}",
            where=where,
            fix=f"{fix}; or remove {item.name!r} from the plan",
        )
        # The front end shows this as the reason why a worker ended.
        current().set_item(item.point, item.name, "refused", str(error))
        current().save()
        raise error from cause


planned_models: Final = PlannedModels()
"""The planned models of this process."""


def _check_class(found: RegisteredModel, kind: type) -> None:
    mistake = find_model_mistake(kind)
    if mistake is not None:
        raise StartError(
            f"the class of the model {found.item.name!r} (from {found.item.origin}) {mistake.what}",
            where=found.plugin.model,
            fix=mistake.fix,
        )


def _target_of(registered: Any) -> str:
    """Return the class behind an entry of vLLM's registry, as ``module:Class``; nothing is imported."""
    if hasattr(registered, "module_name"):
        return f"{registered.module_name}:{registered.class_name}"
    kind = getattr(registered, "model_cls", type(registered))
    return f"{kind.__module__}:{kind.__qualname__}"


def _builds_models() -> bool:
    """Return whether this device's workers build models: those of the simulated accelerator do not."""
    from vllm.platforms import current_platform

    return bool(getattr(type(current_platform), "computes_attention", True))


def _last_line(text: str) -> str:
    """Return the last line of a traceback, which says what was raised."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason was given")
