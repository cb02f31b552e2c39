"""Checks annotations as type checkers read them: where a float is expected, an int will do."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
