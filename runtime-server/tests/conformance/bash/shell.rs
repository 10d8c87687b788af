//! The warm shell: what it keeps, what it shows, what it survives.

use kruntimes_proto::{
    executor::{FunctionRegistrationState as State, InvokeFunctionRequest},
    failure::{Dispatched, Reason},
};
use tonic::{Code, Request};

use super::{function, server, with};
use crate::harness::{Function, failure};

/// The file runs once; no call finds what another left behind.
#[tokio::test]
async fn calls_start_from_what_the_file_set_and_leave_nothing_behind() {
    let server = server().await;
    let code = r#"
echo x >>sourced
count=5
declare -A map=([key]=value)
declare -i number=7
mkdir -p inside && cd inside
helper() { echo "helper $1"; }
handler() {
  echo "$count ${map[key]} $number ${PWD##*/} $(helper "$1") ${left-none} $(umask)"
  count=6 map[key]=other left=behind
  number+=1
  cd /
  umask 000
  set -f
  helper() { echo replaced; }
  trap 'exit 1' USR1
}
"#;
    let function = function(&server, code).await;
    for _ in 0..3 {
        assert_eq!(
            function.call("1").await.as_deref(),
            Ok("5 value 7 inside helper 1 none 0077\n")
        );
    }
    let sourced = std::fs::read_to_string(function.file("sourced")).expect("sourced");
    assert_eq!(sourced, "x\n");
}

/// C-8.2: the context of a call is in its environment, and reaches programs.
#[tokio::test]
async fn a_function_knows_call_run_and_deadline() {
    let server = server().await;
    let code = r#"
left=$(( 1 ))
handler() {
  left=$((KRUNTIME_DEADLINE_MILLIS - ${EPOCHREALTIME/[.,]/} / 1000))
  echo "$(printenv KRUNTIME_INVOCATION_ID) ${TRACEPARENT-none} ${TRACESTATE-none} $KRUNTIME_RUN_UID $FUNC_NAME $((left > 1000 && left <= 5000))"
  echo "row=1" >>"$KRUNTIME_OUTPUTS"
}
"#;
    let mut source = server.source(&[("main.sh", code)]);
    let outputs = source.working_dir.join("outputs");
    source.env = vec![
        ("FUNC_NAME".into(), "hello".into()),
        ("KRUNTIME_OUTPUTS".into(), outputs.display().to_string()),
    ];
    let function = server.ready(&source).await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    for (id, given) in [("a/b?'$(id)", Some(trace)), ("plain", None)] {
        let mut request = Request::new(InvokeFunctionRequest {
            invocation_id: id.into(),
            timeout_millis: 5000,
            ..function.request("1")
        });
        if let Some(trace) = given {
            request
                .metadata_mut()
                .insert("traceparent", trace.parse().expect("ascii"));
            request
                .metadata_mut()
                .insert("tracestate", "a=1, b=x:y".parse().expect("ascii"));
        }
        let got = function.client.clone().invoke_function(request).await;
        let got = got.expect("answer").into_inner().output;
        let (parent, state) = given.map_or(("none", "none"), |trace| (trace, "a=1, b=x:y"));
        let want = format!("{id} {parent} {state} {} hello 1\n", source.run_uid);
        assert_eq!(String::from_utf8_lossy(&got), want);
    }
    assert_eq!(
        std::fs::read_to_string(outputs).expect("outputs"),
        "row=1\nrow=1\n"
    );
}

/// Nothing that the code reads, prints or inherits is the wire.
#[tokio::test]
async fn the_wire_is_out_of_reach() {
    let server = server().await;
    let code = r#"
list() {
  local fd
  for fd in /proc/self/fd/*; do
    [[ $(readlink "$fd") == socket:* ]] && echo "socket at $fd"
  done
  return 0
}
list >found
sh -c 'ls -l /proc/self/fd' | grep socket >>found
cat >>found
{ echo 'done 1 0' >&200; } 2>/dev/null
handler() {
  list
  sh -c 'ls -l /proc/self/fd' | grep socket
  { echo 'done 1 0' >&200; } 2>/dev/null
  cat
  cat found
  echo real
}
"#;
    let function = function(&server, code).await;
    for _ in 0..3 {
        assert_eq!(function.call("1").await.as_deref(), Ok("real\n"));
    }
}

/// Whatever a file does to its shell, calls go on.
#[tokio::test]
async fn a_file_may_bend_its_shell() {
    let server = server().await;
    let bent = r#"
echo x >>sourced
readonly TMOUT=0.02
IFS=,
set -aCf
trap 'builtin echo debug >&2' DEBUG
trap 'builtin exit 9' ERR
for name in printf read mapfile export set unset trap exit eval kill echo test '[' declare source; do
  builtin eval "$name() { command touch shadowed; return 1; }"
done
exec 3>file 200>other
handler() { builtin echo "got $1"; [[ $1 != 3 ]]; }
builtin true
"#;
    let function = function(&server, bent).await;
    let slow = super::function(&server, "handler() { sleep 0.2; }\n").await;
    for _ in 0..2 {
        assert_eq!(function.call("{\"a\":1}").await.as_deref(), Ok("got {\"a\":1}\n"));
        assert_eq!(function.reason("3").await, Reason::HandlerError);
        // Its TMOUT passes meanwhile.
        slow.call("1").await.expect("slow");
    }
    assert_eq!(function.call("2").await.as_deref(), Ok("got 2\n"));
    let sourced = std::fs::read_to_string(function.file("sourced")).expect("sourced");
    assert_eq!(sourced, "x\n", "one shell for all of it");
}

/// The environment cannot put code, functions or options into the shell.
#[tokio::test]
async fn the_environment_does_not_start_code() {
    let server = server().await;
    let mut source = server.source(&[
        // In POSIX mode the missing file would end the shell.
        (
            "main.sh",
            "handler() { . ./missing 2>/dev/null; echo \"fine ${BASH_ENV##*/}\"; }\n",
        ),
        ("start.sh", "cat >eaten; echo started >started\n"),
    ]);
    let start = source.working_dir.join("start.sh").display().to_string();
    source.env = [
        ("BASH_ENV", start.as_str()),
        ("ENV", &start),
        ("SHELLOPTS", "errexit:noexec"),
        ("BASHOPTS", "extdebug"),
        ("POSIXLY_CORRECT", "1"),
        ("BASH_FUNC_printf%%", "() { echo forged; }"),
        ("LC_ALL", "C"),
        ("IFS", "x"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    let function = server.ready(&source).await;
    assert_eq!(function.call("1").await.as_deref(), Ok("fine start.sh\n"));
    assert!(!function.file("started").exists());
}

/// C-5.2 and scenario 73: what cannot be called is never ready, with a reason.
#[tokio::test]
async fn what_cannot_be_loaded_is_never_ready() {
    let server = with(&["--start-timeout", "2s", "--register-wait", "20s"], &[]).await;
    let handler = "handler() { :; }\n";
    let cases = [
        ("handler() {\n  if true; then\n}\n".to_owned(), "status 2"),
        ("other() { :; }\n".to_owned(), "no function handler"),
        ("handler=3\n".to_owned(), "no function handler"),
        (format!("{handler}exit 4\n"), "exited with code 4"),
        (format!("{handler}kill -9 $$\n"), "SIGKILL"),
        (format!("{handler}false\n"), "ended with status 1"),
        (
            format!("set -e\necho last-words >&2\nfalse\n{handler}"),
            "last-words",
        ),
        (format!("{handler}sleep 1000\n"), "not loaded within 2s"),
        (
            format!("{handler}head -c 10000000 /dev/zero; nonsense_command\n"),
            "status 127",
        ),
    ];
    for (code, reason) in cases {
        let source = server.source(&[("main.sh", &code)]);
        let answer = server.register(&source).await.expect("registered");
        assert_eq!(answer.state(), State::Failed, "{code:.40}");
        let function = Function {
            client: server.functions(),
            registration: answer.registration.expect("registration"),
            working_dir: source.working_dir.clone(),
        };
        let status = function.status().await.expect("status");
        assert!(
            status.fatal_error.contains(reason),
            "{code:.40}: {}",
            status.fatal_error
        );
        assert!(status.fatal_error.len() <= 4096);
        assert_eq!(function.reason("1").await, Reason::Recovering);
        function.unregister(false, 0).await.expect("unregister");
    }
    let missing = server.source(&[("other.sh", handler)]);
    assert_eq!(
        server.register(&missing).await.expect("registered").state(),
        State::Failed
    );
    for name in ["echo", "cd", "ls"] {
        let mut builtin = server.source(&[("main.sh", handler)]);
        builtin.handler = format!("main.{name}");
        let answer = server.register(&builtin).await.expect("registered");
        assert_eq!(answer.state(), State::Failed, "{name} is no function of the file");
    }
    for bad in [
        "main",
        "../main.handler",
        "main.handler;id",
        "main.$(id)",
        "main.__kr_run",
    ] {
        let mut named = server.source(&[("main.sh", handler)]);
        named.handler = bad.into();
        let refused = server.register(&named).await.expect_err(bad);
        assert_eq!(refused.code(), Code::InvalidArgument, "{bad}");
        assert!(failure(&refused).detail.contains("handler"), "{bad}");
    }
}

/// `a.b.function` is `a/b.sh`; files source their neighbours from the source's directory.
#[tokio::test]
async fn a_function_may_lie_in_a_directory() {
    let server = server().await;
    let mut source = server.source(&[
        (
            "lib/text.sh",
            ". lib/word.sh\nupper() { echo \"$word ${BASH_SOURCE[0]##*/}\"; }\n",
        ),
        ("lib/word.sh", "word=neighbour\n"),
    ]);
    source.handler = "lib.text.upper".into();
    let function = server.ready(&source).await;
    assert_eq!(function.call("1").await.as_deref(), Ok("neighbour text.sh\n"));
}

/// A function may tidy up its temporary files, and more than that.
#[tokio::test]
async fn a_function_may_remove_its_temporary_directory() {
    for level in ["0", "1"] {
        let server = with(&["--isolation", level], &[]).await;
        let code =
            "handler() { echo x >\"$TMPDIR/file\"; rm -rf \"$TMPDIR\" 2>/dev/null; echo \"done $1\"; }\n";
        let function = function(&server, code).await;
        for round in ["1", "2", "3"] {
            assert_eq!(
                function.call(round).await,
                Ok(format!("done {round}\n")),
                "level {level}"
            );
        }
    }
}

/// C-3.2: where the payload cannot be handed over, the function has not started, and the
/// shell stays.
#[tokio::test]
async fn a_full_disk_refuses_a_call_and_harms_nothing() {
    let server = server().await;
    let function = function(&server, "echo x >>sourced\nhandler() { echo \"$TMPDIR $1\"; }\n").await;
    let answer = function.call("1").await.expect("answer");
    let private = std::path::Path::new(answer.split(' ').next().expect("TMPDIR"));
    // Stands for a full disk: the file of the second call cannot be made.
    let in_the_way = private.join(".call-2.out");
    std::fs::create_dir(&in_the_way).expect("create");
    let refused = function.call("2").await.expect_err("refused");
    assert_eq!(
        (refused.reason, refused.dispatched),
        (Reason::ServerUnavailable, Dispatched::No)
    );
    assert_eq!(function.call("3").await, Ok(format!("{} 3\n", private.display())));
    let sourced = std::fs::read_to_string(function.file("sourced")).expect("sourced");
    assert_eq!(sourced, "x\n");
}
