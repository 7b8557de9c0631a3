"""From a target to a measured draft: what a run will take, and the stages that it goes through."""
