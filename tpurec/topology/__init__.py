"""TPU chips, slices and what moving bytes costs on them: plain Python facts, no device is asked."""
