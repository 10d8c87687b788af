//! `/livez`, `/readyz` and `/metrics`, on a thread of their own.
//!
//! The thread has its own runtime: a main runtime that is busy, even wrongly, must not make the
//! kubelet kill a process that is serving (C-3.14).

use std::{
    fmt::Write,
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
};

use axum::{
    Router,
    extract::{RawQuery, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::sync::oneshot;

use crate::{
    args::AdminAddress,
    metrics::{self, Metrics},
    readiness::{self, Readiness},
};

/// A running admin server. It stops when this drops.
#[derive(Debug)]
#[must_use = "dropping the server stops it"]
pub struct Admin {
    address: Option<SocketAddr>,
    // Dropping the sender is what stops the server.
    _stop: Option<oneshot::Sender<()>>,
}

// === impl Admin ===

impl Admin {
    /// Where it listens, with the real port; `None` when it is off.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

/// Binds and serves. `AdminAddress::Off` gives a server that does nothing.
///
/// # Errors
/// When the address cannot be bound, or the thread not be started; the text names the flag.
pub fn serve(address: AdminAddress, metrics: Arc<Metrics>, readiness: Readiness) -> io::Result<Admin> {
    let AdminAddress::On(address) = address else {
        return Ok(Admin {
            address: None,
            _stop: None,
        });
    };
    let context =
        |error: io::Error| io::Error::new(error.kind(), format!("--admin-address {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(context)?;
    listener.set_nonblocking(true).map_err(context)?;
    let bound = listener.local_addr().map_err(context)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (stop, stopped) = oneshot::channel();
    let routes = router(metrics, readiness);
    thread::Builder::new().name("admin".into()).spawn(move || {
        if let Err(error) = runtime.block_on(run(listener, routes, stopped)) {
            tracing::error!(%error, "the admin server ended");
        }
    })?;
    tracing::info!(address = %bound, "health and metrics are served");
    Ok(Admin {
        address: Some(bound),
        _stop: Some(stop),
    })
}

async fn run(listener: TcpListener, routes: Router, stopped: oneshot::Receiver<()>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    tokio::select! {
        ended = axum::serve(listener, routes).into_future() => ended,
        _ = stopped => Ok(()),
    }
}

fn router(metrics: Arc<Metrics>, readiness: Readiness) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(readiness)
        .merge(Router::new().route("/metrics", get(scrape)).with_state(metrics))
}

async fn readyz(State(readiness): State<Readiness>, RawQuery(query): RawQuery) -> Response {
    let verbose = query.is_some_and(|query| {
        query
            .split('&')
            .any(|pair| pair == "verbose" || pair.starts_with("verbose="))
    });
    let state = readiness.state();
    let status = if state.is_ready() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, describe(&state, verbose)).into_response()
}

fn describe(state: &readiness::State, verbose: bool) -> String {
    let mut page = String::new();
    if verbose {
        for (part, guards) in &state.parts {
            let (mark, word) = if *guards == 0 {
                ('+', "ok")
            } else {
                ('-', "not ready")
            };
            // Writing into a String cannot fail.
            let _ = writeln!(page, "[{mark}]{part} {word}");
        }
        if let Some(reason) = state.failed {
            let _ = writeln!(page, "[-]{reason}");
        }
    }
    if state.is_ready() {
        page.push_str("ok\n");
    } else {
        let missing: Vec<_> = state.failed.into_iter().chain(state.missing()).collect();
        let _ = writeln!(page, "not ready: {}", missing.join(", "));
    }
    page
}

async fn scrape(State(metrics): State<Arc<Metrics>>) -> Response {
    match metrics.encode() {
        Ok(page) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics cannot be encoded");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    use super::*;

    fn start(readiness: &Readiness) -> Admin {
        serve(
            AdminAddress::On(SocketAddr::from(([127, 0, 0, 1], 0))),
            Arc::new(Metrics::new()),
            readiness.clone(),
        )
        .expect("a free port")
    }

    /// Blocking on purpose: no runtime of the test is running while it waits.
    fn get(admin: &Admin, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(admin.address().expect("on")).expect("connect");
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        .expect("write");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("read");
        let status = text[9..12].parse().expect("a status");
        (status, text)
    }

    #[test]
    fn readyz_names_what_is_missing_c_3_14() {
        let readiness = Readiness::new();
        let admin = start(&readiness);
        let guard = readiness.register("routes");
        drop(readiness.register("certificate"));
        let (status, text) = get(&admin, "/readyz");
        assert_eq!(status, 503);
        assert!(text.ends_with("not ready: routes\n"), "{text}");
        let (_, text) = get(&admin, "/readyz?verbose");
        assert!(
            text.contains("[+]certificate ok\n[-]routes not ready\n"),
            "{text}"
        );
        drop(guard);
        assert_eq!(get(&admin, "/readyz").0, 200);
        readiness.fail("draining");
        let (status, text) = get(&admin, "/readyz");
        assert_eq!(status, 503);
        assert!(text.ends_with("not ready: draining\n"), "{text}");
        assert_eq!(get(&admin, "/livez").0, 200, "a draining process lives");
    }

    #[test]
    fn health_answers_while_the_main_runtime_is_blocked() {
        let readiness = Readiness::new();
        let admin = start(&readiness);
        let main = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("runtime");
        // The request is made, and answered, from inside the only thread of the main runtime.
        main.block_on(async { assert_eq!(get(&admin, "/livez").0, 200) });
    }

    #[test]
    fn metrics_are_open_metrics() {
        let admin = start(&Readiness::new());
        let (status, text) = get(&admin, "/metrics");
        assert_eq!(status, 200);
        assert!(text.contains("application/openmetrics-text"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[test]
    fn a_taken_port_names_the_flag() {
        let admin = start(&Readiness::new());
        let taken = AdminAddress::On(admin.address().expect("on"));
        let error = serve(taken, Arc::new(Metrics::new()), Readiness::new())
            .expect_err("taken")
            .to_string();
        assert!(error.contains("--admin-address 127.0.0.1:"), "{error}");
    }

    #[test]
    fn off_is_off() {
        let admin =
            serve(AdminAddress::Off, Arc::new(Metrics::new()), Readiness::new()).expect("nothing to do");
        assert_eq!(admin.address(), None);
    }
}
