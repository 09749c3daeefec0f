"""Writes a config: the TOML text that `sambasim compile --config` reads back into the same options."""

from collections.abc import Mapping

import tomli_w

from sambasim.options.compile import BuildOptions, CompileOptions, ParallelOptions, Sections, options_in_python


def config_text(options: CompileOptions, heading: str) -> str:
    """`heading` becomes the comment on top. What has its default value is left out. Raises OptionError for options that
    do not go together."""
    given = options.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    tables: dict[str, object] = {name: given[name] for name in Sections.model_fields if name in given}
    for table, fields in (("compile", BuildOptions.model_fields), ("parallel", ParallelOptions.model_fields)):
        values: Mapping[str, object] = {name: given[name] for name in fields if name in given}
        if values:
            tables[table] = values
    options_in_python(tables, {})
    comment = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return f"{comment}\n{tomli_w.dumps(tables)}"
