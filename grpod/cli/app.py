"""grpod --role …   runs roles of a run           grpod COMMAND …   looks at a config or a run, from anywhere

Each command stands in a module of its own that imports click alone at its top: what it needs, it imports when it is called.
"""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "config": "grpod.cli.config:config",
    "status": "grpod.cli.status:status",
    "audit": "grpod.cli.audit:audit",
    "stop": "grpod.cli.stop:stop",
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE[-INDEX]",
    help="learner, generator, proxy, or all of them (all); generator-1 takes the second of generator.devices. May be repeated.",
)
@click.option("--config", "config_path", metavar="FILE", help="YAML; without it GRPOD_RUN=URL joins that run.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Overrides a key. May be repeated.")
@click.option(
    "--takeover",
    type=click.Choice(["wait", "exit"]),
    default="wait",
    help="When another learner holds the run: wait for it to end, or exit 3.",
)
@click.option("--log-format", type=click.Choice(["auto", "console", "json"]), help="Overrides telemetry.log_format.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Overrides telemetry.log_level.")
@click.version_option(package_name="grpod", message="grpod %(version)s")
@click.pass_context
def app(
    ctx: click.Context,
    roles: tuple[str, ...],
    config_path: str | None,
    sets: tuple[str, ...],
    takeover: str,
    log_format: str | None,
    log_level: str | None,
) -> int | None:
    """Asynchronous GRPO with LoRA, across machines that share nothing but a storage bucket.

    Every key of the config can be overridden by a variable GRPOD_SECTION__KEY, and by --set.

    Exit: 0 done, or stopped on request; 1 crashed; 2 bad usage or config; 3 the lease is lost, or held by another; 75 a
    dependency never became ready. The first SIGINT or SIGTERM stops it in run.grace_s, the second at once.
    """
    if ctx.invoked_subcommand is not None:
        if roles or config_path or sets:
            raise click.UsageError("--role, --config and --set start roles: they do not go before a command")
        return None
    if not roles:
        raise click.UsageError("say which: --role learner, --role generator, --role proxy, --role all; or a command")
    from grpod.cli import start

    flags = {"telemetry.log_format": log_format, "telemetry.log_level": log_level}
    overrides = (*sets, *(f"{key}={value}" for key, value in flags.items() if value))
    return start.start(roles, config_path, overrides, "exit" if takeover == "exit" else "wait")
