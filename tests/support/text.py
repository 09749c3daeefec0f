"""The text of the example char_gpt, which is made once in a process: the runs of a job of the tests share it."""

from functools import cache

from examples import char_gpt

text = cache(char_gpt.text)
