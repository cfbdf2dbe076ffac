"""Tree attention over paged KV: a plain torch twin and accelerated kernels. Knows nothing of the rest."""
