//! Starts the real binary on a Unix socket and talks gRPC to it.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead as _, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use kruntimes_proto::{
    executor::{
        FunctionRegistration, FunctionRegistrationState as State, FunctionStatusRequest,
        FunctionStatusResponse, InvokeFunctionRequest, InvokeFunctionResponse, RegisterFunctionRequest,
        RegisterFunctionResponse, UnregisterFunctionRequest, function_runtime_client::FunctionRuntimeClient,
        runtime_client::RuntimeClient,
    },
    failure::{Failure, Reason},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::sync::watch;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint},
};

/// Longer than anything here takes; only a failing test waits this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Server {
    child: Child,
    pub(crate) directory: tempfile::TempDir,
    pub(crate) channel: Channel,
    pub(crate) log: Log,
    /// What it says on standard output: the lines of C-8.5.
    pub(crate) said: Log,
    next: AtomicU32,
}

/// Lines that the server writes, to standard error unless told otherwise.
#[derive(Clone)]
pub(crate) struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    count: watch::Receiver<usize>,
}

impl Log {
    fn follow(pipe: Option<impl Read + Send + 'static>) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (tell, count) = watch::channel(0);
        let (pipe, sink) = (pipe.expect("piped"), Arc::clone(&lines));
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let mut lines = sink.lock().expect("log");
                lines.push(line);
                tell.send_replace(lines.len());
            }
        });
        Self { lines, count }
    }

    /// What has arrived so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("log").clone()
    }

    /// How often a worker loaded a function, once the first has; lines are written a little after what they tell.
    pub(crate) async fn loads(&self) -> usize {
        let loaded = "function loaded";
        self.wait_for(&[loaded]).await;
        self.lines().iter().filter(|line| line.contains(loaded)).count()
    }

    /// The first line with all of `words`, now or later.
    pub(crate) async fn wait_for(&self, words: &[&str]) -> String {
        let mut count = self.count.clone();
        let find = || {
            self.lines()
                .into_iter()
                .find(|line| words.iter().all(|word| line.contains(word)))
        };
        let search = async {
            loop {
                if let Some(line) = find() {
                    return Some(line);
                }
                if count.changed().await.is_err() {
                    return find();
                }
            }
        };
        let found = tokio::time::timeout(PATIENCE, search).await.ok().flatten();
        found.unwrap_or_else(|| panic!("no line with {words:?} in:\n{}", self.lines().join("\n")))
    }
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::with(&[], &[]).await
    }

    pub(crate) async fn with(flags: &[&str], env: &[(&str, &str)]) -> Self {
        Self::by(
            Command::new(env!("CARGO_BIN_EXE_kruntimes-runtime-server")),
            flags,
            env,
        )
        .await
    }

    /// As the first process of a PID namespace of its own, like in its container.
    pub(crate) async fn in_namespace(flags: &[&str]) -> Self {
        let mut command = Command::new("unshare");
        if !nix::unistd::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .arg(env!("CARGO_BIN_EXE_kruntimes-runtime-server"));
        Self::by(command, flags, &[]).await
    }

    async fn by(mut command: Command, flags: &[&str], env: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().expect("temporary directory");
        let unix = format!("unix://{}/run/runtime.sock", directory.path().display());
        for name in ["run", "workspace", "state"] {
            fs::create_dir(directory.path().join(name)).expect("directory");
        }
        command
            .args(["--log-format", "plain"])
            .arg("--workspace")
            .arg(directory.path().join("workspace"))
            .arg("--state-dir")
            .arg(directory.path().join("state"))
            .args(if flags.contains(&"--listen") {
                vec![]
            } else {
                vec!["--listen", &unix]
            })
            .args(if flags.contains(&"--peer-check") {
                &[][..]
            } else {
                &["--peer-check", "off"]
            })
            .args(flags)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("start the server");
        let (log, said) = (Log::follow(child.stderr.take()), Log::follow(child.stdout.take()));
        let line = log.wait_for(&["serving", "address="]).await;
        let address = line
            .split_once("address=")
            .and_then(|(_, rest)| rest.split(' ').next())
            .expect("address");
        let endpoint = Endpoint::try_from(address.replace("tcp://", "http://")).expect("endpoint");
        Self {
            child,
            channel: endpoint.connect_lazy(),
            directory,
            log,
            said,
            next: AtomicU32::new(1),
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

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Writes files into a new working directory; not registered yet.
    pub(crate) fn source(&self, files: &[(&str, &str)]) -> Source {
        let run_uid = format!("run-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let working_dir = self.directory.path().join("workspace").join(&run_uid);
        for (name, text) in files {
            let path = working_dir.join(name);
            fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            fs::write(path, text).expect("source");
        }
        Source {
            run_uid,
            working_dir,
            attempt: 1,
            digest: "sha256:00".into(),
            handler: "main.handler".into(),
            env: vec![],
        }
    }

    pub(crate) async fn register(&self, source: &Source) -> Result<RegisterFunctionResponse, Status> {
        self.functions()
            .register_function(source.request())
            .await
            .map(Response::into_inner)
    }

    /// A ready function from one file `main.py`.
    pub(crate) async fn function(&self, code: &str) -> Function {
        let source = self.source(&[("main.py", code)]);
        self.ready(&source).await
    }

    pub(crate) async fn ready(&self, source: &Source) -> Function {
        let answer = self.register(source).await.expect("register");
        let function = Function {
            client: self.functions(),
            registration: answer.registration.clone().expect("registration"),
            working_dir: source.working_dir.clone(),
        };
        if answer.state() != State::Ready {
            panic!("{:?}: {:?}", answer.state(), function.status().await);
        }
        function
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("signal the server");
    }

    /// Waits for its end and returns the exit code.
    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        // Its standard error ends with it.
        let mut count = self.log.count.clone();
        let ended = async { while count.changed().await.is_ok() {} };
        tokio::time::timeout(PATIENCE, ended)
            .await
            .expect("the server goes on");
        self.child.wait().expect("wait").code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) run_uid: String,
    pub(crate) working_dir: PathBuf,
    pub(crate) attempt: i32,
    pub(crate) digest: String,
    pub(crate) handler: String,
    pub(crate) env: Vec<(String, String)>,
}

impl Source {
    pub(crate) fn request(&self) -> RegisterFunctionRequest {
        RegisterFunctionRequest {
            run_uid: self.run_uid.clone(),
            registration_attempt: self.attempt,
            working_dir: self.working_dir.display().to_string(),
            handler: self.handler.clone(),
            env: self.env.iter().cloned().collect::<HashMap<_, _>>(),
            idle_timeout_seconds: 0,
            registration_digest: self.digest.clone(),
        }
    }

    pub(crate) fn reference(&self, registration_id: &str) -> FunctionRegistration {
        FunctionRegistration {
            run_uid: self.run_uid.clone(),
            registration_id: registration_id.into(),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) client: FunctionRuntimeClient<Channel>,
    pub(crate) registration: FunctionRegistration,
    pub(crate) working_dir: PathBuf,
}

impl Function {
    pub(crate) fn request(&self, input: impl Into<Vec<u8>>) -> InvokeFunctionRequest {
        InvokeFunctionRequest {
            registration: Some(self.registration.clone()),
            invocation_id: String::new(),
            input: input.into().into(),
            content_type: "application/json".into(),
            timeout_millis: 30_000,
        }
    }

    pub(crate) async fn send(
        &self,
        request: InvokeFunctionRequest,
    ) -> Result<Response<InvokeFunctionResponse>, Status> {
        self.client.clone().invoke_function(Request::new(request)).await
    }

    pub(crate) async fn call(&self, input: &str) -> Result<String, Failure> {
        self.call_within(input, Duration::from_secs(30)).await
    }

    pub(crate) async fn call_within(&self, input: &str, timeout: Duration) -> Result<String, Failure> {
        let timeout_millis = i64::try_from(timeout.as_millis()).expect("millis");
        match self
            .send(InvokeFunctionRequest {
                timeout_millis,
                ..self.request(input)
            })
            .await
        {
            Ok(answer) => Ok(String::from_utf8(answer.into_inner().output.to_vec()).expect("UTF-8")),
            Err(status) => {
                Err(Failure::from_status(&status).unwrap_or_else(|| panic!("no answer of ours: {status:?}")))
            }
        }
    }

    pub(crate) async fn reason(&self, input: &str) -> Reason {
        self.call(input).await.expect_err("a failure").reason
    }

    pub(crate) async fn status(&self) -> Result<FunctionStatusResponse, Status> {
        let request = FunctionStatusRequest {
            registration: Some(self.registration.clone()),
        };
        self.client
            .clone()
            .function_status(request)
            .await
            .map(Response::into_inner)
    }

    /// Waits until a status poll says so.
    pub(crate) async fn until(
        &self,
        wanted: impl Fn(&FunctionStatusResponse) -> bool,
    ) -> FunctionStatusResponse {
        let poll = async {
            loop {
                let status = self.status().await.expect("status");
                if wanted(&status) {
                    return status;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, poll)
            .await
            .expect("the status never came")
    }

    pub(crate) async fn unregister(
        &self,
        cancel_in_flight: bool,
        drain_timeout_millis: i64,
    ) -> Result<(), Status> {
        let request = UnregisterFunctionRequest {
            registration: Some(self.registration.clone()),
            cancel_in_flight,
            drain_timeout_millis,
        };
        self.client.clone().unregister_function(request).await.map(drop)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.working_dir.join(name)
    }
}

pub(crate) fn failure(status: &Status) -> Failure {
    Failure::from_status(status).unwrap_or_else(|| panic!("no answer of ours: {status:?}"))
}

/// Waits until a file is there: a function says that it got so far.
pub(crate) async fn appears(path: &Path) -> String {
    let poll = async {
        loop {
            if let Ok(text) = fs::read_to_string(path)
                && !text.is_empty()
            {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll)
        .await
        .unwrap_or_else(|_| panic!("{} never came", path.display()))
}

/// Processes whose environment holds `mark` or whose parent is `parent`; of the
/// latter also zombies.
pub(crate) fn processes(parent: Pid, mark: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
            continue;
        };
        let of_parent = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_ascii_whitespace().nth(1))
            .is_some_and(|ppid| ppid == parent.to_string());
        let marked = fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| {
            environ
                .split(|&byte| byte == 0)
                .any(|entry| entry == mark.as_bytes())
        });
        if of_parent || marked {
            found.push(stat);
        }
    }
    found
}
