//! What functions cannot do to each other and to the server (C-8.7, level 1). The
//! server is told to insist on it, so that a kernel without it fails here clearly.

use crate::harness::Server;

#[tokio::test]
async fn a_function_reaches_its_own_files_and_nobody_elses() {
    let server = Server::with(&["--isolation", "1"], &[]).await;
    let neighbour = server.function("def handler(event):\n    return 1\n").await;
    let code = r#"
import os, tempfile
def attempt(action):
    try:
        action()
        return 'ok'
    except OSError as error:
        return type(error).__name__
def handler(path):
    with tempfile.NamedTemporaryFile() as own:
        own.write(b'x')
    return {
        'own': attempt(lambda: open('mine', 'w').write('x')),
        'read': attempt(lambda: open(path).read()),
        'write': attempt(lambda: open(path, 'a').write('x')),
        'list': attempt(lambda: os.listdir(os.path.dirname(path))),
        'image': attempt(lambda: open('/usr/planted', 'w').write('x')),
        'null': attempt(lambda: open('/dev/null', 'w').write('x')),
        'hosts': attempt(lambda: open('/etc/passwd').read()),
    }
"#;
    let function = server.function(code).await;
    let path = neighbour.file("main.py").display().to_string();
    let answer = function.call(&format!("\"{path}\"")).await.expect("answer");
    let denied = "\"PermissionError\"";
    for (name, want) in [
        ("own", "\"ok\""),
        ("null", "\"ok\""),
        ("hosts", "\"ok\""),
        ("read", denied),
        ("write", denied),
        ("list", denied),
        ("image", denied),
    ] {
        assert!(
            answer.contains(&format!("\"{name}\":{want}")),
            "{name} in {answer}"
        );
    }
    assert_eq!(neighbour.call("1").await.as_deref(), Ok("1"));
}

#[tokio::test]
async fn a_function_can_neither_signal_nor_read_processes_outside() {
    let server = Server::with(&["--isolation", "1"], &[]).await;
    let neighbour = server
        .function("import os\ndef handler(event):\n    return os.getpid()\n")
        .await;
    let code = r#"
import os, signal
def attempt(action):
    try:
        action()
        return 'ok'
    except OSError as error:
        return type(error).__name__
def handler(pids):
    return [attempt(lambda: os.kill(pid, signal.SIGKILL)) for pid in pids] + \
        [attempt(lambda: open(f'/proc/{pid}/environ', 'rb').read()) for pid in pids]
"#;
    let function = server.function(code).await;
    let pid = neighbour.call("1").await.expect("pid");
    let answer = function.call(&format!("[{pid},{}]", server.pid())).await;
    let denied = "\"PermissionError\"";
    // CAP_PERFMON may read any process, whatever Landlock says; no Pod of ours has it.
    let environ = if privileged() { "\"ok\"" } else { denied };
    assert_eq!(answer, Ok(format!("[{denied},{denied},{environ},{environ}]")));
    assert_eq!(neighbour.call("1").await, Ok(pid), "the same process");
}

/// Whether this process, and so the server it starts, has CAP_PERFMON or CAP_SYS_ADMIN.
fn privileged() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .expect("CapEff");
    let set = u64::from_str_radix(line.trim(), 16).expect("hexadecimal");
    set & (1 << 38 | 1 << 21) != 0
}

#[tokio::test]
async fn a_worker_has_no_new_privileges_few_descriptors_and_is_killed_first() {
    let server = Server::with(&["--isolation", "1"], &[]).await;
    let code = r#"
import os
def handler(event):
    status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
    return {
        'nnp': status['NoNewPrivs'].strip(), 'seccomp': status['Seccomp'].strip(),
        'sid': os.getsid(0) == os.getpid(), 'oom': int(open('/proc/self/oom_score_adj').read()) >= 700,
        'fds': sorted(int(fd) for fd in os.listdir('/proc/self/fd') if int(fd) < 3 or int(fd) >= 200),
        'few': len(os.listdir('/proc/self/fd')) <= 5,
    }
"#;
    let answer = server.function(code).await.call("1").await.expect("answer");
    assert_eq!(
        answer,
        r#"{"nnp":"1","seccomp":"2","sid":true,"oom":true,"fds":[0,1,2,200],"few":true}"#
    );
}

#[tokio::test]
async fn denied_system_calls_answer_with_eperm() {
    let server = Server::with(&["--isolation", "1"], &[]).await;
    let code = r#"
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def handler(event):
    ctypes.set_errno(0)
    result = libc.unshare(0x10000000)
    return [result, errno.errorcode.get(ctypes.get_errno())]
"#;
    assert_eq!(
        server.function(code).await.call("1").await.as_deref(),
        Ok(r#"[-1,"EPERM"]"#)
    );
}
