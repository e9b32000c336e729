"""AMD GPUs and Hygon DCUs: found and described; serving on them is not in this version."""
