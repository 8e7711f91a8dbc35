"""Sites read as terms: functions of a few predictors each, in closed form where there is one."""
