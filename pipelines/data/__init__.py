"""Click logs on disk: made (synth), read (readers), turned into training Parquet (convert), described."""
