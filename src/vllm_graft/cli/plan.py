"""``vllm-graft plan``: what would be active where, and the origin of each value; nothing is started."""

from __future__ import annotations

import argparse
import copy
import json

from packaging.version import Version

from vllm_graft.boot.env import switched_off
from vllm_graft.cli.printing import render_options, show_findings, table
from vllm_graft.contracts.item import Item
from vllm_graft.errors import ConfigError, OptionError, describe_error
from vllm_graft.findings import Finding, exit_status
from vllm_graft.plan import Plan, PlanRequest, patch_review, resolve
from vllm_graft.plan.catalogue import load
from vllm_graft.plan.resolution import nothing_configured
from vllm_graft.server.callers import Callers
from vllm_graft.text import printable
from vllm_graft.versions import TESTED_BELOW, TESTED_FROM, in_tested_range, vllm_version

HELP = "show what would be active for a model, where, and where each value came from (a dry run)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", required=True, help="the model's name or path, as given to vLLM")
    served = "names it is served under; profiles match them too"
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help=served)
    parser.add_argument(
        "--additional-config", default=None, metavar="JSON", help="the value of vLLM's argument of that name"
    )
    parser.add_argument("--json", action="store_true", help="print plan and findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Resolve and print the plan; return 1 if something in it would be refused."""
    try:
        config = json.loads(args.additional_config) if args.additional_config is not None else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where="--additional-config", fix="quote it as one word") from error
    plan = resolve(PlanRequest(args.model, tuple(args.served_model_name), config))
    if plan.callers:
        Callers.read(plan.callers).check_plan(plan)
    findings = [*switched_off(planned=bool(plan)), *plan.findings, *findings_of(plan)]
    if not plan and not plan.findings:
        findings.append(_for_others() if plan.left_out else nothing_configured())
    if args.json:
        print(json.dumps({**plan.as_dict(), "findings": [found.as_dict() for found in findings]}, indent=2))
        return exit_status(findings)
    for name, reason in plan.left_out.items():
        print(printable(f"{name} {reason}: it is left out"))
    if not plan:
        print(printable(f"nothing is planned for {args.model}: vLLM would run unmodified"))
        print(show_findings(findings))
        return exit_status(findings)
    rows = []
    for item in plan:
        places = {name: f"options.{item.name}.{name}" for name in item.options}
        origins = {name: plan.origins[place] for name, place in places.items() if place in plan.origins}
        options = render_options(item.options, origins)
        rows.append((item.name, item.point, "+".join(item.roles), item.package, options, item.origin))
    print(printable(f"plan {plan.hash} for {plan.model}"))
    print(table(("ITEM", "POINT", "ACTIVE IN", "PACKAGE", "OPTIONS", "FROM"), rows))
    print(f"on_failure = {plan.on_failure} ({plan.origins.get('on_failure', 'default')})", end=", ")
    print(f"endpoint = {str(plan.endpoint).lower()} ({plan.origins.get('endpoint', 'default')})")
    if plan.callers:
        print(printable(f"callers = {plan.callers} ({plan.origins['callers']})"))
    for name, value in (("unknown_keys", plan.unknown_keys), ("other_keys", ", ".join(plan.other_keys))):
        if name in plan.origins:
            print(printable(f"{name} = {value} ({plan.origins[name]})"))
    if findings:
        print(show_findings(findings))
    return exit_status(findings)


def _for_others() -> Finding:
    fix = "name an item for this model, or correct `models=` of the patch"
    return Finding("P004", "info", "plan", "is empty: what is named is for other models", "", fix)


def findings_of(plan: Plan) -> list[Finding]:
    """Return what a start with this plan would refuse or warn of, as far as it shows without importing vLLM."""
    if not plan:
        return []
    found = []
    for item in plan:
        kind = load(item.target, item.name, item.package)
        try:
            if issubclass(kind, Item):
                kind.check_machine(copy.deepcopy(dict(item.options)))
        except OptionError as error:
            what = f"would not start on this machine: its option {error.option!r} {error.what}"
            where = plan.origins.get(f"options.{item.name}.{error.option}", item.origin)
            found.append(Finding("P012", "warning", f"{item.point} {item.name}", what, where, error.fix))
        except (Exception, SystemExit) as error:
            what = f"cannot say what this machine lacks: check_machine raised {describe_error(error)}"
            fix = "raise an OptionError in check_machine, which names the option"
            found.append(Finding("P012", "warning", f"{item.point} {item.name}", what, item.origin, fix))
    version = vllm_version()
    if version is None:
        what, fix = "is not installed here, so versions are not checked", "install a vLLM build for your hardware"
        return [*found, Finding("P001", "warning", "vLLM", what, "", fix)]
    if not in_tested_range(version):
        what = f"{version} is outside the tested range {TESTED_FROM} to {TESTED_BELOW} (exclusive)"
        found.append(Finding("P002", "warning", "vLLM", what, "", "expect refusals by name; test before production"))
    if plan.of("sampler") and Version(Version(version).base_version) < Version("0.31"):
        what = f"run on the V1 model runner: vLLM {version} takes none on its V2 runner"
        found.append(Finding("P005", "warning", "samplers", what, "", "install vLLM 0.31 or newer to have both"))
    return [*found, *patch_review.review(plan.of("patch"), strict=plan.strict)]
