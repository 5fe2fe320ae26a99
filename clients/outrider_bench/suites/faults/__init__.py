"""`outrider bench faults`: what callers notice while parts die, hang, lie and come back."""
