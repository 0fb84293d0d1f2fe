"""Settings of the sections `algorithm` and `preference`, their checks, and what `auto` stands for. No torch."""
