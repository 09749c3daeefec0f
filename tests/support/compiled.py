"""What options name, compiled in this process and without a comparison."""

from collections.abc import Callable
from dataclasses import replace

from sambasim.commands.compile import named_in
from sambasim.compiler.compile import Compiled, compile_model
from sambasim.options.compile import CompileOptions


def compile_from_options(options: CompileOptions, on_phase: Callable[[str], None] = lambda phase: None) -> Compiled:
    model, (inputs, by_keyword, arguments), _, notices = named_in(options, on_phase)
    done = compile_model(model, inputs, options, by_keyword=by_keyword, arguments=arguments, on_phase=on_phase)
    return replace(done, notices=(*notices, *done.notices))
