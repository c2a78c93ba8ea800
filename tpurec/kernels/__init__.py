"""JAX kernels for embedding tables: a reference, a plain-JAX implementation and Pallas kernels. Knows no torch."""
