//! Runs the functions of one Pod behind executor.v1.FunctionRuntime.
