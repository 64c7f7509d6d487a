"""How weight versions reach other machines: one small protocol (`base`), several ways to carry it."""
