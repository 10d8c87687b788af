//! The stubs under `src/gen` are generated and committed, so that a build needs
//! neither protoc nor a build script. This test fails when they differ from the
//! `.proto` files; `make generate` (KRUNTIMES_UPDATE=1) writes them anew.

use std::{fs, path::Path};

#[test]
fn committed_stubs_match_the_proto_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().expect("a temporary folder");
    let files = ["executor/v1/executor.proto", "owner/v1/owner.proto"];
    let descriptors = protox::compile(files, [root]).expect("the proto files compile");
    tonic_prost_build::configure()
        .bytes(".executor.v1.InvokeFunctionRequest.input")
        .bytes(".executor.v1.InvokeFunctionResponse.output")
        .out_dir(out.path())
        .compile_fds(descriptors)
        .expect("code generation");
    for name in ["executor.v1.rs", "kruntimes.owner.v1.rs"] {
        let generated = fs::read_to_string(out.path().join(name)).expect("generated file");
        let committed = root.join("src/gen").join(name);
        let mut kept = fs::read_to_string(&committed).unwrap_or_default();
        // Written only when it changes: everything is compiled again after it.
        if kept != generated && std::env::var_os("KRUNTIMES_UPDATE").is_some() {
            fs::write(&committed, &generated).expect("write the committed stub");
            kept.clone_from(&generated);
        }
        assert!(
            kept == generated,
            "{} is out of date: run `make generate`",
            committed.display()
        );
    }
}
