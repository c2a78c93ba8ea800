"""The DLRM example: the whole job on synthetic click logs, through the public commands only."""
