--[[ Tries to become the one who runs the handler of a key.
     One script, because a record that is read in one step and written in another can be claimed twice.
     It has no flags line: with one, a full Redis would refuse even the replay of a finished answer.
     A new record then gets OOM from its own SET.

  KEYS[1]  record        (string; the layout stands in src/record/codec.rs)
  ARGV[1]  holder        (16 bytes)
  ARGV[2]  fingerprints  (1 to 4 times 36 bytes: recipe id and digest, the current one first)
  ARGV[3]  lease         (milliseconds)
  ARGV[4]  kept for      (milliseconds: the lease, and the retention of an unknown outcome)
  ARGV[5]  on expired    (1 refuse, 2 reexecute)
  ARGV[6]  effects       (1 anywhere, 2 marked by checkpoints)
  Returns  1 acquired, attempt, fence, created (milliseconds), takeover (0 or 1), checkpoint
         | 2 in flight, remaining (milliseconds)
         | 3 completed, response
         | 4 mismatch
         | 5 indeterminate, holder, attempt, fence, checkpoint
         | 6 unreadable
         | 7 large
]]
local time = redis.call('TIME')
local key, holder, prints = KEYS[1], ARGV[1], ARGV[2]
local lease, kept_for, reexecute = tonumber(ARGV[3]), ARGV[4], ARGV[5] == '2'
-- The first two bytes of a new attempt: in flight, or in flight and untouched.
local begun = ARGV[6] == '2' and '\1\5' or '\1\1'

local sub, pack = string.sub, struct.pack
local MAX_48, MAX_32 = 281474976710655, 4294967295
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local term = pack('>I6I4', math.min(now + lease, MAX_48), math.min(lease, MAX_32))

-- A large answer stays where it is: it is not copied through Lua, and the caller reads it by itself.
local record = redis.call('GETRANGE', key, 0, 4095)
if record == '' then
  -- NX, because a string with nothing in it is no record, but it is there.
  local written = redis.call('SET', key, begun .. sub(prints, 1, 36) .. holder
    .. pack('>I4I6I6', 1, now, now) .. term .. '\0\0\0\0', 'NX', 'PX', kept_for)
  if not written then return {6} end
  return {1, 1, now, now, 0, ''}
end

local version, state = string.byte(record, 1, 2)
if version ~= 1 or #record < 84 then return {6} end
local attempt, fence, created, at, granted, noted = struct.unpack('>I4I6I6I6I4I4', record, 55)
local large = #record == 4096
local length = large and redis.call('STRLEN', key) or #record
if large and state ~= 4 then record = redis.call('GET', key) end
local answer = length - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(granted, 1) or 0) then return {6} end

if state ~= 2 then
  local recipe, same = sub(record, 3, 6), nil
  for i = 1, #prints, 36 do
    if sub(prints, i, i + 3) == recipe then
      same = sub(prints, i + 4, i + 35) == sub(record, 7, 38)
      break
    end
  end
  if same == nil then return {6} end
  if not same then return {4} end
end

if state == 4 then
  if large then return {7} end
  return {3, sub(record, 85 + noted)}
end

local owner = sub(record, 39, 54)
local takeover = 0
if state == 1 or state == 5 then
  if owner == holder then
    redis.call('SET', key, sub(record, 1, 70) .. term .. sub(record, 81), 'PX', kept_for)
    -- The first reply may have been lost, and it may have said takeover.
    return {1, attempt, fence, created, attempt > 1 and 1 or 0, sub(record, 85)}
  end
  -- A deadline more than two leases away was written before the clock went back.
  if now < at and at - now <= granted * 2 then return {2, at - now} end
  -- One that died untouched leaves its key as free as if it had said so.
  if state == 1 and not reexecute then
    redis.call('SET', key, '\1\3' .. sub(record, 3, 70) .. pack('>I6I4', now, 0) .. sub(record, 81),
      'KEEPTTL')
    return {5, owner, attempt, fence, sub(record, 85)}
  end
  takeover = state == 1 and 1 or 0
elseif state == 2 then
  -- A claim that arrives after its own sender gave the key up has nobody behind it.
  if owner == holder then return {2, 0} end
else
  if not reexecute then return {5, owner, attempt, fence, sub(record, 85)} end
  takeover = 1
end

attempt = math.min(attempt + 1, MAX_32)
fence = math.min(math.max(fence + 1, now), MAX_48)
-- What an earlier attempt may have done is not undone by one that has not begun.
if takeover == 1 then begun = '\1\1' end
redis.call('SET', key, begun .. sub(prints, 1, 36) .. holder .. pack('>I4I6', attempt, fence)
  .. sub(record, 65, 70) .. term .. sub(record, 81), 'PX', kept_for)
return {1, attempt, fence, created, takeover, sub(record, 85)}
