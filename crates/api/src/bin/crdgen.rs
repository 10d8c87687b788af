//! Prints the CRD named by the argument (`run` or `runtime`) as YAML; both
//! without one.

use std::{io::Write as _, process::ExitCode};

use kruntimes_api::crd;

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let crds = match wanted.as_slice() {
        [] => vec![crd::run(), crd::runtime()],
        [one] if one == "run" => vec![crd::run()],
        [one] if one == "runtime" => vec![crd::runtime()],
        _ => {
            eprintln!("usage: kruntimes-crdgen [run|runtime]");
            return ExitCode::from(2);
        }
    };
    let mut out = std::io::stdout();
    for crd in &crds {
        if let Err(error) = crd::to_yaml(crd)
            .map_err(|error| error.to_string())
            .and_then(|yaml| write!(out, "---\n{yaml}").map_err(|error| error.to_string()))
        {
            eprintln!("cannot print the CRD: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
