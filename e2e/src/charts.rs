//! The charts of this tree, rendered and installed by helm as an operator would.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::processes::tree;

/// Folder of a chart.
#[must_use]
pub fn chart(name: &str) -> PathBuf {
    tree().join("charts").join(name)
}

/// Runs helm; returns what it prints. What it complains of is in the error.
pub async fn helm(kubeconfig: &Path, args: &[&str]) -> Result<String> {
    run("helm", kubeconfig, args, "").await
}

/// Applies objects, as `kubectl apply --server-side` does.
pub async fn apply(kubeconfig: &Path, objects: &[Value]) -> Result<()> {
    send(kubeconfig, objects, &[]).await
}

/// Shows objects to the API server, which says whether it would take them.
pub async fn dry_run(kubeconfig: &Path, objects: &[Value]) -> Result<()> {
    send(kubeconfig, objects, &["--dry-run=server"]).await
}

async fn send(kubeconfig: &Path, objects: &[Value], flags: &[&str]) -> Result<()> {
    if objects.is_empty() {
        return Ok(());
    }
    let list = serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    let mut args = vec!["apply", "--server-side", "--force-conflicts", "-f", "-"];
    args.extend(flags);
    run("kubectl", kubeconfig, &args, &list.to_string()).await?;
    Ok(())
}

/// Deletes objects (`kind/name,kind/name`), as far as they are there.
pub async fn delete(kubeconfig: &Path, namespace: &str, objects: &str) -> Result<()> {
    let mut args = vec!["delete", "--namespace", namespace, "--ignore-not-found"];
    args.extend(objects.split(','));
    run("kubectl", kubeconfig, &args, "").await?;
    Ok(())
}

/// Objects that `charts/kruntimes` makes with these further flags, and a certificate in a Secret.
pub async fn rendered(kubeconfig: &Path, namespace: &str, flags: &[&str]) -> Result<Vec<Value>> {
    let flags = [&["--set", "gateway.tls.existingSecret=cert"], flags].concat();
    render(kubeconfig, "kruntimes", namespace, &flags).await
}

/// Objects that a chart makes in this namespace, with these flags.
pub async fn render(kubeconfig: &Path, name: &str, namespace: &str, flags: &[&str]) -> Result<Vec<Value>> {
    let chart = chart(name).display().to_string();
    let mut args = vec!["template", name, &chart, "--namespace", namespace];
    args.extend(flags);
    let text = helm(kubeconfig, &args).await?;
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text)?;
    Ok(documents.into_iter().filter(Value::is_object).collect())
}

async fn run(program: &str, kubeconfig: &Path, args: &[&str], input: &str) -> Result<String> {
    let mut child = Command::new(program)
        .args(args)
        .env("KUBECONFIG", kubeconfig)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| {
            format!("{program} cannot be started; run the tests by `make e2e` or `dev/test api`")
        })?;
    let mut stdin = child.stdin.take().context("it was to have an input")?;
    stdin.write_all(input.as_bytes()).await?;
    drop(stdin);
    let output = child.wait_with_output().await?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{program} {}: {}\n{printed}{}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(printed)
}
