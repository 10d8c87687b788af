//! The server that the protocol's cases are tried on: one of ours, started for the case,
//! or somebody's own that is running already.
//!
//! | Name | Meaning |
//! | --- | --- |
//! | `KRUNTIMES_CONFORMANCE_ADDRESS` | `http://127.0.0.1:PORT` or `unix:///path` of a running server |
//! | `KRUNTIMES_CONFORMANCE_WORKSPACE` | a directory that both see under the same path |
//! | `KRUNTIMES_CONFORMANCE_LANGUAGE` | whose fixture functions to use, `python` when not given |
//! | `KRUNTIMES_CONFORMANCE_FIXTURES` | a directory with fixture functions of one's own instead |

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Mutex,
};

use kruntimes_proto::{
    executor::{
        FunctionRegistrationState as State, RegisterFunctionRequest,
        function_runtime_client::FunctionRuntimeClient, runtime_client::RuntimeClient,
    },
    failure::Failure,
};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use uuid::Uuid;

use crate::harness::{Function, Server, Source};

pub(crate) struct Target {
    channel: Channel,
    workspace: PathBuf,
    fixtures: PathBuf,
    /// Working directories of this case.
    made: Mutex<Vec<PathBuf>>,
    /// Registrations of this case.
    registered: Mutex<Vec<Function>>,
    /// Ended with the case.
    own: Option<Server>,
}

fn setting(name: &str) -> Option<String> {
    std::env::var(format!("KRUNTIMES_CONFORMANCE_{name}"))
        .ok()
        .filter(|text| !text.is_empty())
}

fn shipped(language: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/conformance/fixtures")
        .join(language)
}

impl Target {
    /// Our own server for one language, on a Unix socket.
    pub(crate) async fn own(language: &str) -> Self {
        Self::of(Server::with(&["--adapter", language], &[]).await, language)
    }

    /// The server at the address that was given; without one our own for Python, on a
    /// TCP address of this machine.
    pub(crate) async fn at_an_address() -> Self {
        let language = setting("LANGUAGE").unwrap_or_else(|| "python".to_owned());
        let Some(address) = setting("ADDRESS") else {
            let flags = ["--adapter", &language, "--listen", "tcp://127.0.0.1:0"];
            return Self::of(Server::with(&flags, &[]).await, &language);
        };
        let workspace = setting("WORKSPACE").expect("WORKSPACE: a directory that both sides see");
        Self {
            channel: Endpoint::try_from(address)
                .expect("ADDRESS: http://127.0.0.1:PORT or unix:///path")
                .connect_lazy(),
            workspace: fs::canonicalize(workspace).expect("WORKSPACE is a directory"),
            fixtures: setting("FIXTURES").map_or_else(|| shipped(&language), PathBuf::from),
            made: Mutex::default(),
            registered: Mutex::default(),
            own: None,
        }
    }

    fn of(server: Server, language: &str) -> Self {
        Self {
            channel: server.channel.clone(),
            workspace: server.directory.path().join("workspace"),
            fixtures: shipped(language),
            made: Mutex::default(),
            registered: Mutex::default(),
            own: Some(server),
        }
    }

    pub(crate) fn functions(&self) -> FunctionRuntimeClient<Channel> {
        FunctionRuntimeClient::new(self.channel.clone())
            .max_decoding_message_size(8 * 1024 * 1024)
            .max_encoding_message_size(8 * 1024 * 1024)
    }

    pub(crate) fn runtime(&self) -> RuntimeClient<Channel> {
        RuntimeClient::new(self.channel.clone())
    }

    /// All fixture functions in a working directory of their own; not registered yet.
    pub(crate) fn source(&self, handler: &str) -> Source {
        let run_uid = Uuid::new_v4().to_string();
        let working_dir = self.workspace.join(&run_uid);
        fs::create_dir(&working_dir).expect("WORKSPACE can be written to");
        self.made.lock().expect("made").push(working_dir.clone());
        // The server may run as somebody else.
        let everybody = fs::Permissions::from_mode(0o777);
        fs::set_permissions(&working_dir, everybody).expect("permissions");
        let files = fs::read_dir(&self.fixtures).expect("the directory of the fixture functions");
        for file in files.flatten() {
            fs::copy(file.path(), working_dir.join(file.file_name())).expect("copy a fixture");
        }
        Source {
            run_uid,
            working_dir,
            attempt: 1,
            digest: format!("sha256:{}", "0".repeat(64)),
            handler: handler.to_owned(),
            env: vec![],
        }
    }

    pub(crate) async fn register(&self, source: &Source) -> Result<Function, Status> {
        let request: RegisterFunctionRequest = source.request();
        let answer = self.functions().register_function(request).await?.into_inner();
        let registration = answer.registration.expect("an answer names its registration");
        assert_eq!(registration.run_uid, source.run_uid);
        let length = registration.registration_id.len();
        assert!((1..=128).contains(&length), "a registration id of {length} bytes");
        let function = Function {
            client: self.functions(),
            registration,
            working_dir: source.working_dir.clone(),
        };
        self.registered.lock().expect("registered").push(function.clone());
        Ok(function)
    }

    /// Registers and waits for READY.
    pub(crate) async fn ready(&self, source: &Source) -> Function {
        let function = self.register(source).await.expect("register");
        let status = function
            .until(|status| status.state() != State::Registering)
            .await;
        assert_eq!(status.state(), State::Ready, "{}", status.fatal_error);
        assert_eq!(status.fatal_error, "");
        function
    }

    /// A ready fixture function.
    pub(crate) async fn function(&self, name: &str) -> Function {
        self.ready(&self.source(&format!("fixtures.{name}"))).await
    }

    /// The code of a refusal. ErrorInfo is ours to send and anybody's to leave out, but
    /// it must agree with the code.
    pub(crate) fn code<T: std::fmt::Debug>(&self, answer: Result<T, Status>) -> Code {
        let status = answer.expect_err("a refusal");
        match Failure::from_status(&status) {
            Some(failure) => assert_eq!(failure.reason.code(), status.code(), "{failure:?}"),
            None => assert!(self.own.is_none(), "our own servers send ErrorInfo: {status:?}"),
        }
        assert!(
            status.message().len() <= 4096,
            "a text of {} bytes",
            status.message().len()
        );
        status.code()
    }

    /// The end of a case that passed: somebody's own server and its workspace are left as
    /// they were. What a failed case leaves is for its reader.
    pub(crate) async fn end(self) {
        if self.own.is_none() {
            for function in self.registered.into_inner().expect("registered") {
                // Most are gone or were replaced.
                let _ = function.unregister(true, 0).await;
            }
            for working_dir in self.made.into_inner().expect("made") {
                let _ = fs::remove_dir_all(working_dir);
            }
        }
    }
}
