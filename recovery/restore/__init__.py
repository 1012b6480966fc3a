"""One loop: plan, try, note what is broken, plan again."""
