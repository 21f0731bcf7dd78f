//! Programs of others that the tests drive: `tests/run` installs what is missing of them.

use std::path::{Path, PathBuf};

/// Where `tests/run` puts what it installs: beside the compiled tests, so that a clean build
/// folder is a clean start.
fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("TEST_TOOLS") {
        return folder.into();
    }
    let test = std::env::current_exe().expect("a test knows its own path");
    let target = test.ancestors().nth(3).expect("target/<profile>/deps/test");
    target.join("test-tools")
}

#[track_caller]
fn present(path: PathBuf, what: &str) -> PathBuf {
    assert!(
        path.exists(),
        "{what} is missing ({}). `tests/run` installs it and runs everything.",
        path.display()
    );
    path
}

/// Python with the packages of `tests/sdk/requirements.txt`.
#[track_caller]
pub fn python() -> PathBuf {
    present(folder().join("venv/bin/python"), "Python with the packages that the tests drive")
}

/// The folder in which the packages of `tests/sdk/package.json` are installed for Node.
#[track_caller]
pub fn node_packages() -> PathBuf {
    let folder = folder().join("node");
    present(folder.join("node_modules/stripe"), "Stripe's client for Node");
    folder
}

/// A file of the tests.
pub fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}
