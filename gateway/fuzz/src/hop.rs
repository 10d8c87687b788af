//! The other end of the hop: bytes of an owner that may be anything, to a gateway that calls it.

use std::time::Duration;

use kruntimes_peer::{
    UnaryChannel, never_sent,
    unary::{Field, Settings},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split},
    sync::Notify,
    task::LocalSet,
    time::timeout,
};

/// The longest answer that is taken, and the window of a call; an input is longer.
const LIMIT: usize = 3000;
const WINDOW: u32 = 1000;
/// Calls that are not over by then hang. Nothing that they wait for takes time.
const HANGS: Duration = Duration::from_secs(20);

/// Whatever an owner says, each call ends, no answer is longer than what is taken, and the connection is known to be
/// over. The first byte says how many calls there are, the second which of their callers go halfway.
pub fn hop(data: &[u8]) {
    let [calls, gone, answers @ ..] = data else { return };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    LocalSet::new().block_on(&runtime, async {
        let ended = timeout(HANGS, exchange(usize::from(calls % 5), *gone, answers)).await;
        assert!(ended.is_ok(), "a call hangs");
    });
}

async fn exchange(calls: usize, gone: u8, answers: &[u8]) {
    let (ours, theirs) = duplex(64 * 1024);
    let (mut said, mut answer) = split(theirs);
    let settings = Settings {
        stream_window: WINDOW,
        ..Settings::default()
    };
    let channel = UnaryChannel::open(ours, &"owner".parse().expect("an authority"), settings);
    let listening = tokio::task::spawn_local(async move {
        let mut heard = Vec::new();
        let _ = said.read_to_end(&mut heard).await;
    });
    let halfway = Notify::new();
    let speak = async {
        let (first, second) = answers.split_at(answers.len() / 2);
        // It may have heard enough.
        let _ = answer.write_all(first).await;
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        halfway.notify_waiters();
        let _ = answer.write_all(second).await;
        let _ = answer.shutdown().await;
    };
    let call = |number: usize| {
        let (channel, halfway) = (&channel, &halfway);
        async move {
            let message = [vec![0; 100 << (3 * number)].into(), vec![1; 100 * number].into()];
            let metadata = [Field::secret("authorization", b"Bearer a"), Field::kept("a", "b")];
            let left = async {
                match gone >> number & 1 {
                    0 => std::future::pending().await,
                    _ => halfway.notified().await,
                }
            };
            tokio::select! {
                answer = channel.unary("/a.B/C", &metadata, message, LIMIT) => {
                    assert!(answer.is_err() || answer.is_ok_and(|answer| answer.message.len() <= LIMIT));
                }
                () = left => {}
            }
        }
    };
    let calls = async {
        let some = |number| async move {
            if number < calls {
                call(number).await;
            }
        };
        tokio::join!(some(0), some(1), some(2), some(3));
    };
    tokio::join!(speak, calls);
    while !channel.is_over() {
        tokio::task::yield_now().await;
    }
    let last = channel.unary("/a.B/C", &[], [vec![0; 5].into(), Vec::new().into()], LIMIT);
    assert!(last.await.is_err_and(|status| never_sent(&status)), "it has hung up");
    drop(channel);
    listening.await.expect("its end comes");
}
