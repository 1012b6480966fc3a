"""The class that Spark writes a checkpoint with on a local disk, where tasks run in the driver's JVM.

Without its native library, which PySpark does not ship, Hadoop starts the command `chmod` for each file that it makes
and for its checksum, twice: 2.5 ms each, one behind the other. This class is Spark's own, on a filesystem of the class
that Spark would use, but Java sets the same modes in its process. Names, checksums and renames are Hadoop's.

No class of Spark's jars does so, nor does a setting: it is compiled in the JVM, once, by the compiler that Spark has
for its own code.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

SPARKS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
OURS = "org.apache.hadoop.fs.RewindCheckpointFileManager"
_BESIDE = "org.apache.hadoop.fs.FilterFileSystem"
"""In its package, where the field for what is filtered can be set."""
_SOURCE = """
package org.apache.hadoop.fs;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.util.ReflectionUtils;
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager;

public class RewindCheckpointFileManager extends FileSystemBasedCheckpointFileManager {
    private final FileSystem files;

    public RewindCheckpointFileManager(Path path, Configuration conf) throws IOException {
        super(path, conf);
        FileSystem found = super.fs();
        if (found instanceof LocalFileSystem && ((FilterFileSystem) found).fs.getClass() == RawLocalFileSystem.class) {
            FilterFileSystem made = (FilterFileSystem) ReflectionUtils.newInstance(found.getClass(), conf);
            made.fs = new Raw();
            made.initialize(found.getUri(), conf);
            files = made;
        } else {
            files = found;
        }
    }

    public FileSystem fs() {
        return files;
    }

    static class Raw extends RawLocalFileSystem {
        public void setPermission(Path path, FsPermission mode) throws IOException {
            try {
                java.nio.file.Path file = pathToFile(path).toPath();
                if ((((Integer) Files.getAttribute(file, "unix:mode")).intValue() & 07000) == 0) {
                    Files.setPosixFilePermissions(file, PosixFilePermissions.fromString(mode.toString()));
                    return;
                }
            } catch (Exception e) {  // a disk without such modes, or a mode that Java has no word for
            }
            super.setPermission(path, mode);  // what a directory has from the one above it, chmod leaves
        }
    }
}
"""

log = logging.getLogger("rewind.start")


def is_defined(jvm: Any) -> bool:
    """Return whether the JVM has `OURS`, which is compiled when it is first asked for."""
    with suppress(Exception):
        jvm.java.lang.Class.forName(OURS)
        return True
    try:
        _define(jvm)
    except Exception as error:  # whatever it is: Spark's own class writes the same files
        log.debug("%s is used, as %s could not be compiled: %s", SPARKS, OURS, error)
        return False
    return True


def _define(jvm: Any) -> None:
    beside, handles = jvm.java.lang.Class.forName(_BESIDE), jvm.java.lang.invoke.MethodHandles
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(beside.getClassLoader())
    compiler.cook(_SOURCE)
    lookup = handles.privateLookupIn(beside, handles.lookup())
    codes = compiler.getBytecodes()
    for name in sorted(codes, reverse=True):  # a class is linked as it is defined: the nested one comes first
        lookup.defineClass(codes[name])
