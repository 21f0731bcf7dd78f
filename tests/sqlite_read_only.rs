//! An SQLite file, or a folder, that this program may only read: said at the start, and by `ready`.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool};
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::{SqliteLeaseStore, SqliteStore, Store as _, StoreError, StoreErrorKind};

/// The name of the test below, and the variable that tells it that it is the child.
const READ_ONLY_FILE: &str =
    "an_sqlite_file_that_may_only_be_read_is_not_ready_and_says_what_to_change";
const WITHOUT_OVERRIDE: &str = "READ_ONLY_FILE_CHILD";

/// Root may write everything. So the test runs in a child of its own, without that right where it has it.
#[tokio::test]
async fn an_sqlite_file_that_may_only_be_read_is_not_ready_and_says_what_to_change() {
    if std::env::var_os(WITHOUT_OVERRIDE).is_none() {
        let folder = tempfile::tempdir().unwrap();
        let probe = folder.path().join("probe");
        std::fs::write(&probe, "").unwrap();
        allow(&probe, 0o444);
        let mut child = match OpenOptions::new().write(true).open(&probe) {
            Ok(_) => {
                let mut child = Command::new("setpriv");
                child
                    .args(["--bounding-set", "-dac_override"])
                    .arg(std::env::current_exe().unwrap());
                child
            }
            Err(_) => Command::new(std::env::current_exe().unwrap()),
        };
        child.args(["--exact", READ_ONLY_FILE]).env(WITHOUT_OVERRIDE, "1");
        let ended = child.output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && said.contains("1 passed"), "{said}\n{ended:?}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pay.db");
    let store = SqliteStore::open(&path).await.unwrap();
    store.migrate().await.unwrap();
    store.ready().await.unwrap();
    // Somebody writes at this moment, and is not waited for.
    let payment = store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    tokio::time::timeout(Duration::from_secs(2), store.ready()).await.unwrap().unwrap();
    payment.rollback().await.unwrap();
    store.pool().close().await;

    let says = |error: StoreError| {
        let printed = error.to_string();
        assert!(
            printed.contains("(-wal, -shm), and the folder")
                || printed.contains("read and write both"),
            "{printed}"
        );
        error.kind()
    };
    allow(&path, 0o444);
    assert_eq!(says(SqliteStore::open(&path).await.unwrap_err()), StoreErrorKind::Backend);
    // In a journal mode that lets a file be read so. What an attempt to read left beside the file is as it was.
    for part in ["pay.db", "pay.db-wal", "pay.db-shm"] {
        let part = folder.path().join(part);
        if part.exists() {
            allow(&part, 0o644);
        }
    }
    let plain = SqliteConnectOptions::new().filename(&path).journal_mode(SqliteJournalMode::Delete);
    SqlitePool::connect_with(plain.clone()).await.unwrap().close().await;
    allow(&path, 0o444);
    let tools = SqliteLeaseStore::open_existing(&path).await.unwrap();
    assert_eq!(says(tools.ready().await.unwrap_err()), StoreErrorKind::Unavailable);
    allow(&path, 0o644);
    let pool = SqlitePool::connect_with(plain.read_only(true)).await.unwrap();
    let store = SqliteStore::from_pool(pool).await.unwrap();
    assert_eq!(says(store.ready().await.unwrap_err()), StoreErrorKind::Unavailable);
    sqlx::query("SELECT count(*) FROM idempotency_records").execute(store.pool()).await.unwrap();

    // A folder in which nothing can be made.
    allow(folder.path(), 0o555);
    let log = SqliteStore::open(&path).await.unwrap_err();
    let new = SqliteStore::open(folder.path().join("new.db")).await.unwrap_err();
    allow(folder.path(), 0o755);
    assert_eq!(says(log), StoreErrorKind::Backend);
    assert_eq!(says(new), StoreErrorKind::Backend);
    let nowhere = SqliteStore::open(folder.path().join("none/pay.db")).await.unwrap_err();
    assert_eq!(says(nowhere), StoreErrorKind::Backend);
}

fn allow(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}
