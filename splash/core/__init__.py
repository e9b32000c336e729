"""The nouns of SPLASH and the ownership algebra. Integers and numpy only; torch is never imported here."""
