"""What somebody does who wants to hurt the node or another tenant, or kills at a bad moment."""
